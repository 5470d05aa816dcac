"""Random numbers that depend on a key, a counter and the element's index, never on the sharding."""
