"""Runs for minutes what fails rarely: killed and mismatched ranks, threads, memory over many calls."""
