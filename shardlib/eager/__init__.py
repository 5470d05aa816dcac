"""Runs ops on ShardedTensors outside `jit`, one at a time; `dispatch` is the entry for new calls."""
