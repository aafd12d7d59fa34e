"""From a graph to a running plan: cover, rank, plan files, explain, and the autograd Function that runs plans."""
