"""What a step would take on a machine: a program walked on a clock. Estimates, never measurements.

`collectives` has a row for every kind of message, `rooflines` for families of ops; `timeline` walks the program,
`simulated` shows what came out, `measure` finds the figures of the machine at hand.
"""
