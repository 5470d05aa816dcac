"""Specs and layouts: what users write, and what the compiler knows about one value."""
