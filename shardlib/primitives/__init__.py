"""Per-device code by hand: `shard_map`, its doors, its collectives, its one-device oracle."""
