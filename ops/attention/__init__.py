"""Attention: the op, its backends, its gradient, and what its variants share."""
