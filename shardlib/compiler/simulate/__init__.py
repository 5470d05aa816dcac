"""Simulates a program on a machine: estimates, never measurements.

`collectives` has a row for every kind of message, `rooflines` for families of ops. `timeline` walks the program on a
clock, `simulated` shows the results.
"""
