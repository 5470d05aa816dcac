"""Pipelines: a step is divided into stages and microbatches, and a schedule orders the fragments of each stage."""
