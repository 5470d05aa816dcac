"""Rewrites of lookups in tables, and in stacks of tables, as one gather."""
