"""How messages travel between ranks: process groups, shared memory, CUDA peers."""
