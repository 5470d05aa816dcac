"""Chains of moves, pads, slices and strided views, dim by dim."""
