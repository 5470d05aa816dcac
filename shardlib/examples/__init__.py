"""Programs that use shardlib from end to end: `python -m shardlib.examples.train_gpt` is the first to run."""
