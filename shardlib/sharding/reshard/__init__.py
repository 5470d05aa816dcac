"""From one layout to another: the collectives, their bytes and their estimated time.

A *cut* of a value is a tuple with one entry per factor: the mesh axes over it, major first, in prime parts. `plan`
moves factors, `route` values whose dims are made of several.
"""

from shardlib.sharding.reshard.prices import USUAL, Prices
from shardlib.sharding.reshard.refactor_exchange import Crossing, crossed_seconds, crossings
from shardlib.sharding.reshard.routing import Hop, plan, route, seconds
from shardlib.sharding.reshard.step import Axes, Cut, Leaves, Step, local_numel

__all__ = [
    "USUAL",
    "Axes",
    "Crossing",
    "Cut",
    "Hop",
    "Leaves",
    "Prices",
    "Step",
    "crossed_seconds",
    "crossings",
    "local_numel",
    "plan",
    "route",
    "seconds",
]
