"""Collectives: one file an op, over whichever transport is picked."""
