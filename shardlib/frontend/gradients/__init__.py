"""Gradients across the border of a program: autograd's state of inputs, and the backward pass in the graph."""
