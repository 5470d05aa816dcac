"""Rules of ops that make, move, index or reduce tensors."""
