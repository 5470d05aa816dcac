"""Answers which values a graph's nodes have, as far as the program alone tells."""
