"""A jitted function at work: it looks a call up, plans it where it is new, runs it, and puts what it changed."""
