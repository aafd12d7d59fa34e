"""Compiled kernels of our own: what names them, where they are kept, how they are made and loaded."""
