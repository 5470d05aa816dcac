"""Collectives: one file per op, over the transport that `transport/pick.py` picks."""
