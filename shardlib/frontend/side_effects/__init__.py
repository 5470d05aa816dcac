"""What a call changes beside its results: mutations, leaks, what stands in for tensors."""
