"""Everything of torch that is not public API and that shardlib uses, with the reason for each."""
