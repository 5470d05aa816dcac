"""Complete programs that use shardlib; start with `python -m shardlib.examples.train_gpt`."""
