"""Flattens a call into leaves, state and a key, and records the guards under which a program serves it."""
