"""Random numbers that depend on a key, an op and the element's place, never on the sharding."""
