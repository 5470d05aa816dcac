"""`ShardedTensor`: its form, how it is placed, moved, converted, kept and shown."""
