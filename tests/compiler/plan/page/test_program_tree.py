"""Folding: a tree that is unfolded again is the sequence of its leaves."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from shardlib.compiler.plan.page.program_tree import Leaf, Node, TreeBuilder, walk


def unfold(nodes: Sequence[Node]) -> list[object]:
    """Keys of all leaves, in order."""
    out: list[object] = []
    for node in nodes:
        own = [node.leaf.key] if node.leaf is not None else unfold(node.children)
        out += own * node.times
    return out


def random_leaves(seed: int) -> list[Leaf]:
    """Blocks that repeat, in groups of groups, with some leaves between them."""
    draw = random.Random(seed)
    leaves: list[Leaf] = []
    for group in range(draw.randint(1, 4)):
        block = [(draw.choice("ab"), draw.randint(0, 2)) for _ in range(draw.randint(1, 4))]
        for layer in range(draw.randint(1, 6)):
            path = (f"phase{group % 2}", *([f"layers.{layer}"] if draw.random() < 0.8 else []))
            leaves += [Leaf(path, f"{name}_{layer}", (name, size)) for name, size in block]
    return leaves


@pytest.mark.parametrize("seed", range(60))
def test_an_unfolded_tree_is_the_sequence(seed: int) -> None:
    leaves = random_leaves(seed)
    tree = TreeBuilder().build(leaves)
    assert unfold(tree) == [leaf.key for leaf in leaves]
    assert sum(total for node, _, total in walk(tree) if node.leaf is not None) == len(leaves)


def test_layers_fold_by_their_number_alone() -> None:
    leaves = [Leaf((f"layers.{i}", "mlp"), f"mm_{i}", ("mm", 64 if i < 4 else 32)) for i in range(7)]
    assert [(n.text, n.last, n.times) for n in TreeBuilder().build(leaves)] == [
        ("layers.0", "layers.3", 4),
        ("layers.4", "layers.6", 3),
    ]


def test_repeats_of_several_nodes_are_named_by_them() -> None:
    leaves = [Leaf((), text, text) for text in ["a", "b", "c"] * 3]
    (node,) = TreeBuilder().build(leaves)
    assert (node.text, node.times, [child.text for child in node.children]) == ("a, b, ...", 3, ["a", "b", "c"])
