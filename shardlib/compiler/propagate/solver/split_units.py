"""Splits units: ops of one unit may choose differently where their neighbors differ.

Units make the search small, but a unit whose one end is needed whole and whose other end is needed in shards has one
choice. So every op begins with its unit's choice and chooses alone. Ops of a unit that still agree stay together.
"""

from __future__ import annotations

from shardlib.compiler.propagate.solver.estimate import Free, Weights
from shardlib.compiler.propagate.solver.search import TIE, Search

SHARE = (
    0.1  # a hidden message counts this much: of two plans that hide their messages, the one that sends less is better
)
_ROUNDS = 3  # after each, the neighbors of changed ops may change, too
# The least shares of the estimated time that are worth a choice of its own, and a split that does not send less.
_SMALL, _WORTH = 3e-3, 1e-2


def split_units(search: Search) -> None:
    """Lets every op choose alone, and keeps the result if it is faster."""
    if not search.has_choice or search.effort.stops():
        return
    before, (work, sent) = search.choices, search.estimate.decided_seconds(search.choices)
    for _ in range(_ROUNDS):
        now = search.choices
        search.minimize(_near_costs(search))
        if search.choices == now:
            break
    new_work, new_sent = search.estimate.decided_seconds(search.choices)
    slower = new_work + new_sent - work - sent
    if slower > 0 or (new_sent >= sent and slower > -_WORTH * (work + sent)):
        search.choices = before


def _near_costs(search: Search) -> Free:
    """Returns the unit classes that could save time by a choice of their own, and their neighbors."""
    domains = {unit_class: search.domain((unit_class,)) for unit_class in range(len(search.choices))}
    costly = search.estimate.costly(search.choices, domains, _SMALL * search.seconds)
    near = search.estimate.neighbors(*sorted(costly))
    return {(k,): (domains[k], domains[k].places) for k in sorted(near) if len(domains[k].orders) > 1}


def send_less(search: Search) -> None:
    """Sends fewer bytes where the program then takes hardly longer."""
    if not search.effort.stops():
        limit = search.seconds + sum(search.estimate.program_seconds(search.choices)) * (TIE - 1)
        search.send_fewer_bytes(search.domains(search.variables()), limit)


def hide_messages(search: Search) -> None:
    """Decides again as if hidden messages cost little, and keeps the result if the program gets markedly faster."""
    before, estimate = search.choices, search.estimate
    if not search.problem.hidden or search.effort.stops():
        return
    seconds = estimate.unhidden(before)
    if seconds <= estimate.program_seconds(before)[0] * TIE:
        return
    search.weights = Weights(hidden=SHARE)
    search.minimize(search.domains(search.variables()))
    search.minimize(_near_costs(search))
    if estimate.unhidden(search.choices) * TIE >= seconds:
        search.choices, search.weights = before, Weights()
