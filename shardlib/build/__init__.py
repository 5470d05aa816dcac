"""Compiling shardlib's own kernels: what is compiled, how, and where it is kept."""
