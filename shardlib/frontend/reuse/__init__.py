"""Traces repeated parts of a program once, and copies their nodes for the other calls."""
