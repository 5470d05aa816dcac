"""The user's ways in: `jit`, `shard_map`, `scan`, `shard`."""
