"""From a traced graph to a program that runs: the pipeline, its options, and a package per stage."""
