"""Engines: the contract, the GPU architectures as data, and the import-free manifest."""
