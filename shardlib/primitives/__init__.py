"""Per-device code by hand: `shard_map` bodies, their boundary and collectives, and their run on one device."""
