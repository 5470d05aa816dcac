"""What a call of a jitted function is made of: its leaves, the state that it brings, its key, and what it changes."""
