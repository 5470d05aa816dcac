"""Emits the local forms of rules: calls written by hand, or recorded torch code."""
