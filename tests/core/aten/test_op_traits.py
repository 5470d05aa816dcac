"""Who shares memory with whom: measured by running ops and comparing storages, and compared with the table."""

from __future__ import annotations

import itertools
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardlib.compiler.codegen.op_callables import callable_of
from shardlib.core.aten.op_traits import _TABLE, TRAITS, has_trait, is_view, may_return_view
from tests.helpers.prover import kernel, target_of
from tests.rules.rule_samples import SAMPLES, f
from tests.validation.sweep.entries import op_db

aten = torch.ops.aten

DTYPES = (torch.float64, torch.complex128, torch.int64)
PARTS = 32  # of the OpInfos, a test each; the first has those of ops in the table, too


class Recorder(TorchDispatchMode):
    """Runs every op twice, as itself and as generated programs call it, and notes which arguments its results show."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: set[Any] = set()
        self.shown: dict[Any, set[str]] = defaultdict(set)
        self.copied: set[Any] = set()  # views whose result had memory of its own
        self.slack: set[Any] = set()  # ops whose sums lie in larger memory, called as generated programs do

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        given = [*zip((a.name for a in op._schema.arguments), args, strict=False), *kwargs.items()]
        memory = {name: {place for x in tree_leaves(value) for place in _places(x)} for name, value in given}
        out = op(*args, **kwargs)
        if not op._schema.is_mutable and torch.Tag.nondeterministic_seeded not in op.tags:
            self._note(op, memory, out)
            self._note(op, memory, made := callable_of(op)(*args, **kwargs))
            if isinstance(made, Tensor) and made.layout == torch.strided and not made.dim() and not self.shown[op]:
                self.slack |= {op} if made.untyped_storage().nbytes() > made.nbytes else set()
        return out

    def _note(self, op: Any, memory: dict[str, set[int]], out: Any) -> None:
        self.ran.add(op)
        results = {place for x in tree_leaves(out) for place in _places(x)}
        shown = {name for name, places in memory.items() if places & results}
        self.shown[op] |= shown
        if results and not shown:
            self.copied.add(op)

    @property
    def unmarked(self) -> list[str]:
        """What shares memory although the table (or the schema) does not say so."""
        faults = []
        for op, names in self.shown.items():
            said = {op._schema.arguments[0].name} if is_view(op) else set()
            if not names <= said and not may_return_view(op):
                faults.append(f"{op} shows {sorted(names - said)}")
        return faults


def _places(x: Any) -> Iterator[int]:
    if isinstance(x, Tensor) and x.layout == torch.strided and x.numel() and type(x) is Tensor:
        yield x.untyped_storage().data_ptr()


def _measured(part: int, samples: int) -> Recorder:
    recorder = Recorder()
    listed = lambda info: info.name.rpartition(".")[2] in _TABLE
    for info in (x for i, x in enumerate(op_db()) if i % PARTS == part or (part == 0 and listed(x))):
        for dtype in (d for d in DTYPES if d in info.dtypes):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                wants = info.supports_autograd and dtype == torch.float64
                for sample in itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=wants), samples):
                    try:
                        with recorder:
                            out = tree_leaves(info(sample.input, *sample.args, **sample.kwargs))
                            sum(x.sum() for x in out if isinstance(x, Tensor) and x.requires_grad).backward()
                    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError, AttributeError):
                        continue  # the sample needs what is not there (a library, a sparse layout); what ran is noted
    return recorder


@pytest.mark.long
@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, PARTS))])
def test_what_ops_share_is_in_the_table(part: int) -> None:
    recorder = _measured(part, samples=1)
    assert len(recorder.ran) > 40, "a part of them is some"
    assert not recorder.unmarked, recorder.unmarked


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_what_ops_share_is_in_the_table_in_every_sample(part: int) -> None:
    recorder = _measured(part, samples=30)
    assert not recorder.unmarked, recorder.unmarked
    assert not recorder.slack, f"their results take more memory than plans say: {recorder.slack}"


@pytest.mark.parametrize("name", [name for name, words in _TABLE.items() if "overallocates" in words])
def test_sums_lie_in_memory_of_their_size(name: str) -> None:
    op = getattr(aten, name).default
    x, y = torch.rand(8, 8), torch.rand(8, 8)
    assert op(x, y).untyped_storage().nbytes() > 4, "then it need not stand in the table"
    called = callable_of(op)(x, y)
    assert called.untyped_storage().nbytes() == 4
    assert called.equal(op(x, y))


@pytest.mark.long
def test_what_the_ops_of_rules_share_is_in_the_table() -> None:
    recorder = Recorder()
    for name, args, kwargs in (sample for family in SAMPLES for sample in family()):
        with recorder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some are deprecated
            kernel(target_of(name))(*args, **kwargs)
    assert {"aten::lift", "aten::unsafe_split.Tensor", "aten::unsafe_split_with_sizes"} <= {
        op.name() for op in recorder.ran
    }
    assert not recorder.unmarked, recorder.unmarked
    assert not [op for op in recorder.copied if is_view(op)], "a view always shows its operand"


@pytest.mark.parametrize("name", [name for name, words in _TABLE.items() if "view" in words])
def test_what_shows_memory_is_measured(name: str) -> None:
    """Every line of the table about memory is true: there is a call whose result shows its operand."""
    x, v = f(2, 2), f(4)
    calls: dict[str, tuple[Any, ...]] = {
        "_unsafe_view": (x, [4]), "unsafe_split": (x, 1), "unsafe_chunk": (x, 2), "conj_physical": (x,),
        "unsafe_split_with_sizes": (x, [1, 1]), "sum_to_size": (x, [2, 2]), "type_as": (x, x), "set": (x, f(2)),
        "broadcast_tensors": ([x, x],), "meshgrid": ([v],), "cartesian_prod": ([v],), "einsum": ("i", [v]),
        "flatten_dense_tensors": ([x],), "unflatten_dense_tensors": (v, [v]), "_to_cpu": ([x],),
    }  # fmt: skip
    dtypes = dict(zip(("Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short"),
                      (torch.uint8, torch.int8, torch.float64, torch.float32, torch.half, torch.int32, torch.int64,
                       torch.int16), strict=True))  # fmt: skip
    if name.startswith("_cast_"):
        calls[name] = (x.to(dtypes[name.removeprefix("_cast_")]),)
    if name == "_saturate_weight_to_fp16":
        calls[name] = (x.float(),)
    args = calls.get(name, (x, 0.5, False) if name.endswith("dropout") else (x,))
    out = getattr(aten, name)(*args)
    assert {p for t in tree_leaves(out) for p in _places(t)} & {p for t in tree_leaves(args) for p in _places(t)}


# --- the other traits -------------------------------------------------------------------------------------------------


def test_names_and_traits_exist() -> None:
    assert {word for words in _TABLE.values() for word in words.split(", ")} == set(TRAITS)
    missing = []
    for name in _TABLE:
        namespace, _, op = name.rpartition("::")
        packet, _, overload = op.partition(".")
        ops = getattr(torch.ops, namespace or "aten")
        missing += [] if hasattr(getattr(ops, packet, None), overload or "overloads") else [name]
    assert not missing
    with pytest.raises(AssertionError, match="no trait is called 'veiws'"):
        has_trait(aten.t.default, "veiws")


@pytest.mark.parametrize("name", ["alias", "detach", "lift", "lift_fresh", "clone", "_to_copy", "lift_fresh_copy"])
def test_renamed_and_copied(name: str) -> None:
    x, op = f(2, 3).t(), getattr(aten, name).default
    out = op(x)
    assert torch.equal(out, x)
    same = list(_places(out)) == list(_places(x))
    assert (has_trait(op, "is_alias"), has_trait(op, "copies")) == (same, not same)


@pytest.mark.parametrize(
    ("op", "args"),
    [(aten.view.default, ([6],)), (aten.reshape.default, ([3, 2],)), (aten._unsafe_view.default, ([6],)),
     (aten._reshape_alias.default, ([6], [1])), (aten.unsqueeze.default, (1,)), (aten.squeeze.default, ()),
     (aten.squeeze.dim, (0,)), (aten.squeeze.dims, ([0],))],
)  # fmt: skip
def test_regrouped(op: Any, args: Any) -> None:
    x = f(2, 3)
    assert has_trait(op, "keeps_order")
    assert torch.equal(op(x, *args).flatten(), x.flatten())


def test_what_is_alike_by_name_only() -> None:
    """Overloads that do something else have none of a trait that is for one."""
    assert not has_trait(aten.view.dtype, "keeps_order")
    assert callable_of(aten.view.dtype)(torch.ones(2), torch.int32).dtype == torch.int32
    assert not has_trait(aten.unbind.int, "keeps_order")


@pytest.mark.parametrize("name", ["add", "mul"])
def test_commuting(name: str) -> None:
    op, x, y = getattr(aten, name).Tensor, f(3), f(3)
    assert has_trait(op, "commutes")
    assert torch.equal(op(x, y), op(y, x))
    assert not has_trait(aten.sub.Tensor, "commutes")


def test_marks() -> None:
    x = torch.randn(3, 3, dtype=torch.complex128)
    assert aten._conj(x).is_conj()
    assert aten._neg_view(x).is_neg()
    assert [
        op for op in (aten._conj.default, aten._neg_view.default, aten.neg.default) if has_trait(op, "sets_lazy_bit")
    ] == [
        aten._conj.default,
        aten._neg_view.default,
    ]
    solved = torch.linalg.solve_triangular(x.triu(), x.mH, upper=True)
    assert not callable_of(aten.linalg_solve_triangular.default)(x.triu(), x.mH, upper=True).is_conj()
    assert torch.allclose(x.triu() @ solved, x.mH)


def test_what_nobody_measured_may_show_anything() -> None:
    library = torch.library.Library("traits_test", "DEF")
    library.define("own(Tensor x) -> Tensor")
    library.define("keep(Tensor x) -> ()")
    assert may_return_view(torch.ops.traits_test.own.default)
    assert may_return_view(torch.ops.traits_test.keep.default)
    assert may_return_view(len)
    assert not may_return_view(torch.ops.shardlib.attention.default)
