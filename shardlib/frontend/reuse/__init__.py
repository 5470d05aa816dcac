"""Parts of a trace that are used again: loop bodies, subgraphs, what ops made before."""
