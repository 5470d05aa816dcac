"""Passes over memory: what is freed, reused, recomputed or offloaded."""
