"""Keeps ranks in step, and names ranks that are out of step or gone."""
