"""Masks and heads of attention, said in the one way that stages know."""
