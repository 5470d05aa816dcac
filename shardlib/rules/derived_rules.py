"""Rules that the graph derives from others. Equal ops get one object, because caches know a rule by its identity."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from shardlib.core.bounded_cache import BoundedCache
from shardlib.rules.rule import Rule

_DERIVED: BoundedCache[tuple[int, Hashable], tuple[Rule, Rule]] = BoundedCache(1 << 11)


def derive_rule(rule: Rule, key: Hashable, derive: Callable[[], Rule]) -> Rule:
    """Returns `derive()`, which depends on nothing but `rule` and `key`.

    Calls with an equal rule and key return one object.
    """
    if (entry := _DERIVED.get((id(rule), key))) is None:
        entry = _DERIVED[id(rule), key] = rule, derive()  # the entry keeps the rule, whose id is in the key
    return entry[1]
