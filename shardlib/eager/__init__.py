"""Ops on ShardedTensors outside `jit`, one at a time: `dispatch` is the entry, for what `warm` does not know yet."""
