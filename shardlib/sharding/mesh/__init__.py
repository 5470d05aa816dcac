"""Devices: the mesh, its text, and the world of ranks."""
