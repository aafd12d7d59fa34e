"""The op table, one file per family: ports, attributes, rules, references, gradients, flops and bytes."""
