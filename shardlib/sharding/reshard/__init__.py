"""From one layout to another: the collectives, their bytes and their estimated time.

`FactorAxes` holds one entry per factor: the mesh axes over it, major first, in prime parts. `plan_steps` reshards
factors, `plan_route` values whose dims are made of several factors.
"""

from shardlib.sharding.reshard.prices import DEFAULT_PRICES, Prices
from shardlib.sharding.reshard.refactor_exchange import RefactorExchange, plan_refactor_exchanges, refactor_seconds
from shardlib.sharding.reshard.routing import RouteStep, estimate_seconds, plan_route, plan_steps
from shardlib.sharding.reshard.step import Axes, FactorAxes, FactorSizes, Step, local_numel

__all__ = [
    "DEFAULT_PRICES",
    "Axes",
    "FactorAxes",
    "FactorSizes",
    "Prices",
    "RefactorExchange",
    "RouteStep",
    "Step",
    "estimate_seconds",
    "local_numel",
    "plan_refactor_exchanges",
    "plan_route",
    "plan_steps",
    "refactor_seconds",
]
