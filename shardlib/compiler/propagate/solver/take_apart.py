"""Units taken apart: ops of one unit may choose apart where their neighbors differ.

Units make the search small, but a unit whose one end is needed whole and whose other end is needed in shards has one
choice. So every op begins with its unit's choice and chooses alone. Ops of a unit that still agree stay together.
"""

from __future__ import annotations

from shardlib.compiler.propagate.solver.cost import Free, Weights
from shardlib.compiler.propagate.solver.search import TIE, Search

SHARE = 0.1  # of a hidden message is paid while choices are compared: of two ways to hide, the one that sends less
_ROUNDS = 3  # in which ops beside those that changed may change, too
_SMALL = 3e-3  # shares of the estimated time that nobody looks for in one place
_WORTH = 1e-2  # the least share of the estimated time for which units are taken apart, unless less is sent


def take_apart(search: Search) -> None:
    """Let every op choose alone, and keep that where it is faster."""
    if not search.has_choice or search.effort.stops():
        return
    before, (work, sent) = search.choices, search.estimate.parts(search.choices)
    for _ in range(_ROUNDS):
        now = search.choices
        search.minimize(_near_costs(search))
        if search.choices == now:
            break
    new_work, new_sent = search.estimate.parts(search.choices)
    slower = new_work + new_sent - work - sent
    if slower > 0 or (new_sent >= sent and slower > -_WORTH * (work + sent)):
        search.choices = before


def _near_costs(search: Search) -> Free:
    """All kinds beside one that could save time by a choice of its own."""
    domains = {kind: search.domain((kind,)) for kind in range(len(search.choices))}
    costly = search.estimate.costly(search.choices, domains, _SMALL * search.seconds)
    near = search.estimate.beside(*sorted(costly))
    return {(kind,): (domains[kind], domains[kind].places) for kind in sorted(near) if len(domains[kind].orders) > 1}


def send_less(search: Search) -> None:
    """Send fewer bytes where the program then takes hardly longer."""
    if not search.effort.stops():
        limit = search.seconds + sum(search.estimate.whole(search.choices)) * (TIE - 1)
        search.spare(search.domains(search.variables()), limit)


def hide_messages(search: Search) -> None:
    """Decide once more as if messages that arithmetic can hide cost little, and keep that if the whole program then
    takes markedly less."""
    before, estimate = search.choices, search.estimate
    if not search.problem.propagation.hidden or search.effort.stops():
        return
    seconds = estimate.unhidden(before)
    if seconds <= estimate.whole(before)[0] * TIE:
        return
    search.weights = Weights(hidden=SHARE)
    search.minimize(search.domains(search.variables()))
    search.minimize(_near_costs(search))
    if estimate.unhidden(search.choices) * TIE >= seconds:
        search.choices, search.weights = before, Weights()
