"""One call of a jitted function: its leaves and key, the specs of its arguments, and how it runs."""
