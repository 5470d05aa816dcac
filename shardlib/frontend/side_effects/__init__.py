"""Detects and repeats the changes of a call beside its results: mutations, leaks, stand-ins of tensors."""
