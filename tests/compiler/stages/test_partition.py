"""The automatic cut against exhaustive search, on graphs of known shapes, and its refusals."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise, product

import pytest

from shardlib.compiler.stages.explain_cut import Partition
from shardlib.compiler.stages.partition import CutNode, TiedParameter, partition
from shardlib.core.errors import ShardingError


@dataclass(frozen=True)
class Case:
    """The arguments of one call of `partition`."""

    nodes: list[CutNode]
    stages: int
    link: float = 0.25
    latency: float = 0.0
    memory: int | None = None
    fixed: dict[int, int] = field(default_factory=dict)
    tied: list[TiedParameter] = field(default_factory=list)
    microbatches: int = 1
    live: list[int] | None = None

    def cut(self) -> Partition:
        return partition(
            self.nodes,
            self.stages,
            link_seconds_per_byte=self.link,
            latency=self.latency,
            memory=self.memory,
            fixed=self.fixed,
            tied=self.tied,
            microbatches=self.microbatches,
            live=self.live,
        )

    def prices(self) -> Iterator[tuple[float, int, int]]:
        """Yields for every assignment and way to keep tied parameters its seconds, traffic, and largest memory."""
        nodes, numbers = self.nodes, range(len(self.nodes))
        for stages in product(range(self.stages), repeat=len(nodes)):
            if any(stages[i] != stage for i, stage in self.fixed.items()):
                continue
            if any(stages[x] > stages[i] for i in numbers for x in nodes[i].inputs):
                continue
            if {stages[i] for i in numbers if nodes[i].seconds} != set(range(self.stages)):
                continue
            firsts = [min(stages[x] for x in parameter.readers) for parameter in self.tied]
            for owners in product(*([None, *range(first + 1)] for first in firsts)):
                yield self.price(stages, owners)

    def price(self, stages: tuple[int, ...], owners: tuple[int | None, ...]) -> tuple[float, int, int]:
        """Adds up all messages; a parameter whose owner is None has copies."""
        live = self.live or [1] * self.stages
        seconds, memory, traffic = [0.0] * self.stages, [0] * self.stages, 0

        def send(source: int, target: int, nbytes: int, times: int, per_step: bool) -> None:
            nonlocal traffic
            for stage in (source, target):
                seconds[stage] += times * (self.latency + self.link * nbytes) / (self.microbatches if per_step else 1)
            traffic += times * nbytes * (1 if per_step else self.microbatches)

        for i, node in enumerate(self.nodes):
            seconds[stages[i]] += node.seconds
            memory[stages[i]] += node.memory + live[stages[i]] * node.saved
            for target in {stages[j] for j, reader in enumerate(self.nodes) if i in reader.inputs} - {stages[i]}:
                send(stages[i], target, node.nbytes, 1 + node.has_gradient, per_step=False)
        for parameter, owner in zip(self.tied, owners, strict=True):
            present = sorted({stages[x] for x in parameter.readers})
            if owner is None:
                for stage in present:
                    memory[stage] += parameter.memory
                for source, target in pairwise(present):
                    send(source, target, parameter.nbytes, 2, per_step=True)
                continue
            memory[owner] += parameter.memory
            for stage in set(present) - {owner}:
                memory[stage] += 2 * parameter.nbytes
                send(owner, stage, parameter.nbytes, 2, per_step=True)
        return max(seconds), traffic, max(memory)

    def optimum(self) -> tuple[float, int] | None:
        """The least seconds, and the least traffic of those, by exhaustive search."""
        limit = float("inf") if self.memory is None else self.memory
        return min(((seconds, traffic) for seconds, traffic, memory in self.prices() if memory <= limit), default=None)


def random_case(seed: int) -> Case:
    """A random graph of 6 to 10 nodes in 2 to 4 stages; small numbers make many ties, so all sums are exact."""
    rng = random.Random(seed)
    size, stages = rng.choice([(6, 2), (6, 3), (7, 4), (8, 3), (8, 2), (10, 2)])
    most = rng.choice([1, 2, 3])
    nodes = []
    for i in range(size):
        inputs = rng.sample(range(i), rng.randint(0, min(i, most)))
        nodes.append(
            CutNode(
                f"n{i}",
                seconds=float(rng.choice([0, 1, 2, 3, 5, 8])),
                inputs=tuple(inputs),
                nbytes=rng.choice([0, 1, 2, 4]),
                memory=rng.choice([0, 1, 3]),
                saved=rng.choice([0, 1]),
                has_gradient=rng.random() < 0.8,
            )
        )
    readers = tuple(rng.sample(range(size), rng.randint(2, 3)))
    return Case(
        nodes,
        stages,
        link=rng.choice([0.0, 0.25, 0.5, 1.0]),
        latency=rng.choice([0.0, 0.5]),
        memory=rng.choice([None, None, 9, 14]),
        fixed={rng.randrange(size): rng.randrange(stages)} if rng.random() < 0.2 else {},
        tied=[TiedParameter("w", readers, rng.choice([1, 2]), rng.choice([1, 4]))] if rng.random() < 0.3 else [],
        microbatches=rng.choice([1, 2, 4]),
        live=[stages - i for i in range(stages)] if rng.random() < 0.5 else None,
    )


@pytest.mark.sampled(20)
@pytest.mark.parametrize("block", range(20))
def test_cut_is_as_good_as_exhaustive_search(block: int) -> None:
    for seed in range(10 * block, 10 * block + 10):
        case = random_case(seed)
        optimum = case.optimum()
        if sum(node.seconds > 0 for node in case.nodes) < case.stages or optimum is None:
            with pytest.raises(ShardingError):
                case.cut()
            continue
        cut = case.cut()
        assert cut.exact, seed
        assert (cut.seconds, cut.traffic) == optimum, seed
        assert cut.bound == cut.seconds, seed


def chain(seconds: list[float], nbytes: list[int]) -> list[CutNode]:
    return [CutNode(f"n{i}", s, (i - 1,) if i else (), b) for i, (s, b) in enumerate(zip(seconds, nbytes, strict=True))]


def unet() -> list[CutNode]:
    """Three levels down and up, each level's skip joins the way up."""
    down = [CutNode(f"down{i}", 2.0, (i - 1,) if i else (), 4 >> i) for i in range(3)]
    return [
        *down,
        CutNode("middle", 2.0, (2,), 1),
        CutNode("up2", 2.0, (3, 2), 1),
        CutNode("up1", 2.0, (4, 1), 2),
        CutNode("up0", 2.0, (5, 0), 4),
    ]


def encoder_decoder() -> list[CutNode]:
    encoder = [CutNode(f"encoder{i}", 2.0, (i - 1,) if i else (), 1) for i in range(3)]
    decoder = [CutNode(f"decoder{i}", 3.0, (2, 2 + i) if i else (2,), 1) for i in range(4)]
    return [*encoder, *decoder]


def two_towers() -> list[CutNode]:
    left = [CutNode(f"left{i}", 1.0, (i - 1,) if i else (), 1) for i in range(4)]
    right = [CutNode(f"right{i}", 2.0, (3 + i,) if i else (), 1) for i in range(3)]
    return [*left, *right, CutNode("loss", 1.0, (3, 6), 1)]


def middle_loss() -> list[CutNode]:
    """A loss of the first half joins the last loss."""
    half = chain([2.0, 2.0, 2.0], [2, 2, 2])
    return [
        *half,
        CutNode("loss0", 1.0, (1,), 1),
        CutNode("n3", 2.0, (2,), 2),
        CutNode("loss1", 1.0, (4,), 1),
        CutNode("sum", 0.0, (3, 5), 1),
    ]


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("graph", [unet, encoder_decoder, two_towers, middle_loss])
def test_shapes_of_models(graph: object, stages: int) -> None:
    case = Case(graph(), stages, link=0.125)  # type: ignore[operator]
    cut = case.cut()
    assert (cut.seconds, cut.traffic) == case.optimum()


def test_branches_are_assigned_independently() -> None:
    """Each tower is one stage, which no cut of an order that takes turns between towers gives."""
    nodes = [
        CutNode("a0", 1.0, (), 8),
        CutNode("b0", 1.0, (), 8),
        CutNode("a1", 1.0, (0,), 8),
        CutNode("b1", 1.0, (1,), 8),
        CutNode("a2", 1.0, (2,), 0),
        CutNode("b2", 1.0, (3,), 0),
    ]
    cut = Case(nodes, 2, link=1.0).cut()
    assert cut.stages in ((0, 1, 0, 1, 0, 1), (1, 0, 1, 0, 1, 0))
    assert cut.seconds == 3.0


@pytest.mark.parametrize(
    ("memory", "text"),
    [
        (None, "wte is owned by stage 0 and sent to 1 once a step (2 B and its gradient)"),
        (12, "wte is owned by stage 0 and sent to 1 once a step (2 B and its gradient)"),
    ],
)
def test_tied_embedding_has_one_owner(memory: int | None, text: str) -> None:
    nodes = chain([1.0, 4.0, 4.0, 1.0], [1, 1, 1, 1])
    cut = Case(nodes, 2, memory=memory, tied=[TiedParameter("wte", (0, 3), 2, 8)], microbatches=4).cut()
    assert cut.tied == (text,)
    assert cut.seconds == 5 + 2 * 0.25 + 2 * 2 * 0.25 / 4


def test_copies_where_an_owner_would_send_to_many() -> None:
    nodes = chain([4.0] * 4, [0] * 4)
    cut = Case(nodes, 4, tied=[TiedParameter("w", (0, 1, 2, 3), 4, 4)]).cut()
    assert cut.tied == ("w has a copy in stages 0, 1, 2, 3; their gradients are summed once a step",)
    assert cut.seconds == 4 + 2 * 2 * 4 * 0.25
    owned = Case(nodes, 4, tied=[TiedParameter("w", (0, 1, 2, 3), 4, 10)], memory=10).cut()
    assert owned.seconds == cut.seconds, "a limit that copies reach"


def test_a_parameter_of_one_stage_costs_nothing() -> None:
    cut = Case(chain([1.0, 1.0, 4.0], [0] * 3), 2, tied=[TiedParameter("w", (0, 1), 4, 4)]).cut()
    assert cut.tied == ("w is read by stage 0 alone",)
    assert cut.traffic == 0


def test_live_microbatches_weigh_on_early_stages() -> None:
    nodes = [CutNode(f"n{i}", 1.0, (i - 1,) if i else (), 0, memory=1, saved=1) for i in range(6)]
    cut = Case(nodes, 2, live=[4, 1], memory=12).cut()
    assert cut.stages == (0, 0, 1, 1, 1, 1)
    assert [cost.memory for cost in cut.costs] == [10, 8]


def test_ties_go_to_fewer_bytes_then_earlier_cuts() -> None:
    assert Case(chain([1.0, 0.0, 1.0], [3, 1, 0]), 2, link=0.0).cut().stages == (0, 0, 1)
    assert Case(chain([1.0, 0.0, 1.0], [1, 3, 0]), 2, link=0.0).cut().stages == (0, 1, 1)
    assert Case(chain([2.0, 1.0, 1.0, 1.0, 2.0], [0] * 5), 2).cut().stages == (0, 0, 1, 1, 1)


def test_text() -> None:
    nodes = [
        CutNode("embed", 1e-3, (), 2**20, memory=2**20),
        CutNode("layers.0", 4e-3, (0,), 2**20, memory=2**20),
        CutNode("layers.1", 4e-3, (1,), 2**20, memory=2**20),
        CutNode("head", 2e-3, (2,), 2**20, memory=2**20),
    ]
    cut = Case(nodes, 2, link=1e-10, tied=[TiedParameter("embed.weight", (0, 3), 2**20, 2**22)], microbatches=2).cut()
    assert str(cut).splitlines() == [
        "2 stages, 6.315 ms per microbatch (stage 1); bound 6.315 ms: no assignment is faster",
        "stage 0: embed to layers.0 (2 nodes), 5.315 ms (5 ms work, 0.3146 ms messages), 6.29 MB",
        "  cut 0|1: sends layers.0 to stage 1 (1.05 MB); behind layers.1 stage 0 would need 9.315 ms; before layers.0 "
        "stage 1 would need 10.31 ms",
        "stage 1: layers.1 to head (2 nodes), 6.315 ms (6 ms work, 0.3146 ms messages), 4.19 MB",
        "tied: embed.weight is owned by stage 0 and sent to 1 once a step (1.05 MB and its gradient)",
    ]


def test_text_says_where_memory_forbids_another_cut() -> None:
    nodes = [CutNode(f"n{i}", 1.0, (i - 1,) if i else (), 0, memory=10) for i in range(4)]
    cut = Case(nodes, 2, memory=20).cut()
    assert "behind n2 stage 0 would need 30 B of 20 B" in str(cut)


REFUSALS = {
    "stages": (
        Case(chain([1.0, 0.0, 1.0], [1, 1, 1]), 4),
        "4 stages need 3 cuts, but there are 1 places to cut:\n"
        "  * 2 of 3 nodes take time\n"
        "Rule: every stage has a node that takes time\n"
        "Remedy: use fewer stages",
    ),
    "memory": (
        Case([CutNode(f"n{i}", 1.0, (i - 1,) if i else (), 1, memory=7) for i in range(3)], 2, memory=10),
        "no assignment to 2 stages fits into 10 B per stage:\n"
        "  * the smallest need of the largest stage is 14 B\n"
        "Remedy: allow 14 B, or use more stages, or a schedule that holds fewer microbatches",
    ),
    "flow": (
        Case(chain([1.0] * 4, [1] * 4), 3, fixed={0: 2, 2: 1, 3: 0}),
        "a value would flow backwards:\n"
        "  * n2 is fixed to stage 1, and depends on n0 of stage 2\n"
        "  * n3 is fixed to stage 0, and depends on n0 of stage 2\n"
        "Rule: the stage of a node is not before the stages of its inputs\n"
        "Remedy: assign the reader to the same or a later stage",
    ),
    "fixed": (
        Case(chain([1.0] * 3, [1] * 3), 3, fixed={0: 1}),
        "no assignment gives each of 3 stages a node that takes time:\n"
        "  * n0 is fixed to stage 1\n"
        "Remedy: fix fewer nodes, or use fewer stages",
    ),
    "numbers": (
        Case([CutNode("a", 1.0, (1,)), CutNode("b", -1.0)], 2, fixed={0: 2, 5: 0}, live=[1]),
        "the graph cannot be cut:\n"
        "  * a (node 0) reads node 1, which is not before it\n"
        "  * b (node 1) has a negative cost\n"
        "  * a is fixed to stage 2 of 2\n"
        "  * node 5, fixed to stage 0, does not exist\n"
        "  * live has 1 numbers, where there are 2 stages\n"
        "Rule: nodes are 0 to 1 in topological order",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    case, text = REFUSALS[name]
    with pytest.raises(ShardingError) as error:
        case.cut()
    assert str(error.value) == text


def layers(n: int, width: int) -> list[CutNode]:
    """Equal residual layers with `width` parallel branches of two ops; branches send much more than layers do."""
    nodes = [CutNode("embed", 1.0, (), 1)]
    for layer in range(n):
        x = len(nodes) - 1
        for branch in range(width):
            nodes.append(CutNode(f"{layer}.{branch}.a", 3.0, (x,), 8))
            nodes.append(CutNode(f"{layer}.{branch}.b", 3.0, (len(nodes) - 1,), 8))
        ends = tuple(x + 2 + 2 * branch for branch in range(width))
        nodes.append(CutNode(f"{layer}.sum", 1.0, (x, *ends), 1))
    return nodes


@pytest.mark.parametrize("stages", [2, 4])
def test_equal_layers_are_cut_between_layers(stages: int) -> None:
    nodes = layers(16, 3)
    cut = Case(nodes, stages, link=0.5).cut()
    assert {crossing.node for crossing in cut.crossings} == {f"{16 * i // stages - 1}.sum" for i in range(1, stages)}
    assert cut.seconds == 16 / stages * 19 + 2, "a stage has two messages, or one and the embedding"


def test_limited_search_has_a_bound() -> None:
    """Thirty independent nodes have too many cuts to see all."""
    nodes = [CutNode(f"n{i}", 1.0 + i % 7) for i in range(30)]
    cut = Case(nodes, 4).cut()
    total = sum(node.seconds for node in nodes)
    assert not cut.exact
    assert cut.bound == total / 4 <= cut.seconds <= 1.1 * cut.bound
    assert "the search was limited" in str(cut)
