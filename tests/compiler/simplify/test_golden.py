"""Every rewrite on small graphs, as text: `golden/NAME.txt` holds graphs before and after the rewrite NAME.

After `---` follows the graph that the rewrite makes, without dead nodes. To add a case, write `== TITLE`, a graph and
`---`. `python -m tests.compiler.simplify.test_golden` then writes the expected graphs of all cases; read the diff.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx

from shardlib.compiler.simplify import PASSES, verify
from shardlib.compiler.simplify.redundant_nodes import drop_dead_nodes
from shardlib.compiler.simplify.rewrite import RewritePass
from shardlib.primitives.out_spec_claims import check_claims
from tests.helpers.graph_text import parse_graph, show_graph

FOLDER = Path(__file__).parent / "golden"
REWRITES = {run.__name__: run for run in PASSES if run is not check_claims}  # check_claims raises errors
# Rewrites after which results may round otherwise.
ROUNDS = {"attach_row_sums", "divide_losses_late", "skip_singular_vectors", "split_fft_dims"}


def list_cases(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yields the title, the graph and the expected graph of each case of a file."""
    for case in re.split(r"^== ", path.read_text(), flags=re.MULTILINE)[1:]:
        title, _, graphs = case.partition("\n")
        before, _, after = graphs.partition("---\n")
        yield title, before.strip(), after.strip()


CASES = [(path.stem, *case) for path in sorted(FOLDER.glob("*.txt")) for case in list_cases(path)]
over_cases = pytest.mark.parametrize(
    ("name", "title", "before", "after"), CASES, ids=[f"{name}: {title}" for name, title, *_ in CASES]
)


def run_rewrite(name: str, gm: fx.GraphModule) -> None:
    REWRITES[name](gm)
    drop_dead_nodes(gm)
    verify(gm)


def draw_inputs(gm: fx.GraphModule) -> list[Tensor]:
    """Draws numbers for the inputs of a graph: 0 or 1 for integers, which are mostly indices."""
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for val in (node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"):
        if val.dtype.is_floating_point or val.dtype.is_complex:
            inputs.append(torch.randn(val.shape, dtype=val.dtype, generator=generator))
        else:
            inputs.append(torch.randint(2, val.shape, generator=generator).to(val.dtype))
    return inputs


@over_cases
def test_text(name: str, title: str, before: str, after: str) -> None:
    gm = parse_graph(before)
    run_rewrite(name, gm)
    assert show_graph(gm) == after
    assert show_graph(parse_graph(after)) == after


@over_cases
def test_values(name: str, title: str, before: str, after: str) -> None:
    """The graphs before and after return the same bits, unless the rewrite is one that rounds otherwise."""
    gm = parse_graph(before)
    inputs = draw_inputs(gm)
    expected = fx.Interpreter(gm).run(*inputs)
    run_rewrite(name, gm)
    tolerance = 1e-5 if name in ROUNDS else 0
    for result, other in zip(fx.Interpreter(gm).run(*inputs), expected, strict=True):
        torch.testing.assert_close(result, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_every_rewrite_changes_a_graph() -> None:
    changed = {name for name, _, before, after in CASES if before != after}
    assert set(REWRITES) - changed == set()
    assert {path.stem for path in FOLDER.glob("*.txt")} - set(REWRITES) == set(), "files of rewrites that are gone"


def test_every_row_changes_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any single row of a `RewritePass`, some golden text must differ."""
    without_case = []
    for name, rewrite in REWRITES.items():
        if not isinstance(rewrite, RewritePass):
            continue
        for row in rewrite.rows:
            others = [other for other in rewrite.rows if other is not row]
            fewer = RewritePass(name, *others, backward=rewrite.backward, erases=rewrite.erases)
            monkeypatch.setitem(REWRITES, name, fewer)
            if all(_has_text(name, before, after) for case, _, before, after in CASES if case == name):
                without_case.append(f"{name}: {row}")
            monkeypatch.undo()
    assert without_case == []


def _has_text(name: str, before: str, after: str) -> bool:
    gm = parse_graph(before)
    run_rewrite(name, gm)
    return show_graph(gm) == after


def test_text_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="'x f32' is no line of a graph"):
        parse_graph("x f32")


def write_expected() -> None:
    for path in sorted(FOLDER.glob("*.txt")):
        texts = []
        for title, before, _ in list_cases(path):
            gm = parse_graph(before)
            run_rewrite(path.stem, gm)
            texts.append(f"== {title}\n{before}\n---\n{show_graph(gm)}\n")
        path.write_text("\n".join(texts))


if __name__ == "__main__":
    write_expected()
