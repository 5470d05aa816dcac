"""Transports of messages between ranks: process groups, shared memory, CUDA peers."""
