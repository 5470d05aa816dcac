"""The command line: `python -m shardlib plan`, `python -m shardlib doctor`, and the console script `shardlib`."""
