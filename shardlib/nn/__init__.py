"""Modules of torch on a mesh: which parameter lives where, and a forward that is compiled."""
