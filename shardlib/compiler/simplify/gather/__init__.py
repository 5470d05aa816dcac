"""Look-ups in tables, and stacks of them, as one gather."""
