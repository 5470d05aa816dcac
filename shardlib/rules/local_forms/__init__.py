"""Local forms: the code that devices run instead of an op whose dims are sharded."""
