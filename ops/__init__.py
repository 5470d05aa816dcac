"""What sharded programs call on a device: one op, one file, always the same parts in the same order.

Schema, fake, reference, autograd partner, backends, and `choose`, which says which backend runs and why.
"""
