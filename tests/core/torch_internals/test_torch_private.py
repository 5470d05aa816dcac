"""Private names of torch are in `torch_private.py` alone; a name that torch lacks is one clear error."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardlib.core.torch_internals import torch_private

pytestmark = pytest.mark.together
ROOT = Path(__file__).parents[3]
FILE = ROOT / "shardlib" / "core" / "torch_internals" / "torch_private.py"
# Private names of Python's own: frames, named tuples, caches, weak references, the dict of `os.environ`; and IPython's.
PYTHONS = {"_getframe", "_replace", "_fields", "_field_defaults", "_lru_cache_wrapper", "_remove_dead_weakref", "_data"}
PYTHONS |= {"_repr_html_"}


@functools.cache
def sources() -> dict[str, ast.Module]:
    """The project's files but that one."""
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text())
        for folder in ("shardlib", "ops")
        for path in sorted((ROOT / folder).rglob("*.py"))  # does not follow links to folders
        if path != FILE
    }


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def of_torch(name: str) -> bool:
    """Whether a dotted name is a private one of torch; ops are public by their names."""
    first, *rest = name.split(".")
    if rest[:1] == ["ops"] and rest[1:] and not is_private(rest[1]):
        return False
    return first == "torch" and any(map(is_private, rest))


def texts(nodes: Iterable[ast.AST]) -> Iterator[str]:
    return (x.value for x in nodes if isinstance(x, ast.Constant) and isinstance(x.value, str))


def own(tree: ast.AST) -> Iterator[str]:
    """The names that a file defines: functions, what stands in classes, attributes that methods set."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (x.id for part in node.body for x in ast.walk(part) if isinstance(x, ast.Name))
            yield from (
                text for part in node.body if isinstance(part, ast.Assign) for text in texts(ast.walk(part))
            )  # slots
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and chain(node.value, {}) == "self":
            yield node.attr


@functools.cache
def owned() -> set[str]:
    return {name for tree in sources().values() for name in own(tree)} | PYTHONS


NAME = re.compile(r"_[a-zA-Z]\w*")
# The names, and parts of names, that the one file writes down.
WORDS = {
    part for text in texts(ast.walk(ast.parse(FILE.read_text()))) for part in text.split(".") if NAME.fullmatch(part)
}


def chain(node: ast.AST, known: dict[str, str]) -> str:
    """`a.b.c`, where `a` is what the file knows by that name."""
    if isinstance(node, ast.Attribute):
        return f"{chain(node.value, known)}.{node.attr}"
    return known.get(node.id, node.id) if isinstance(node, ast.Name) else "?"


def private_of_torch(tree: ast.AST) -> list[str]:
    """The private names of torch that a file imports, reads, or writes as a text."""
    known: dict[str, str] = {}  # what the file calls something in torch
    found, nodes = [], [*ast.walk(tree)]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            known |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
        if isinstance(node, ast.Import):
            known |= {name.asname: name.name for name in node.names if name.asname}
            found += [name.name for name in node.names if of_torch(name.name)]
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            known |= {node.targets[0].id: "torch.ops.aten"} if chain(node.value, {}) == "torch.ops.aten" else {}
    found += [name for name in known.values() if of_torch(name)]
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            name = chain(node, known)
            theirs = node.attr in WORDS if node.attr in owned() else not name.startswith("torch.ops.")
            if of_torch(name) or (theirs and not name.startswith("self.")):
                found.append(name)
    return found + [text for text in texts(nodes) if text in WORDS or (text.isprintable() and _names(text))]


def _names(text: str) -> bool:
    return re.fullmatch(r"torch(\.\w+)+", text) is not None and of_torch(text)


@pytest.mark.long
def test_private_names_of_torch_are_in_one_file() -> None:
    found = {path: names for path, tree in sources().items() if (names := private_of_torch(tree))}
    assert found == {}


PLANTED = {
    "attribute": "import torch\ntorch._C._len_torch_function_stack()",
    "of the class": "from torch import Tensor\nTensor._make_subclass",
    "from": "from torch._subclasses import FakeTensor",
    "private from public": "from torch.overrides import _pop_mode",
    "module": "def f():\n    import torch._dynamo",
    "module by another name": "import torch.utils._pytree as pytree",
    "for types alone": "if TYPE_CHECKING:\n    from torch._ops import OpOverload",
    "by way of a module": "from torch.nn.attention import flex_attention as flex\nflex._validate_device = None",
    "namespace": "import torch\ntorch.ops._c10d_functional.all_reduce",
    "of an object": "def f(op):\n    return op._schema.arguments",
    "of an object, otherwise unknown": "def f(x):\n    return x.untyped_storage()._weak_ref()",
    "by getattr": "getattr(x, '_is_param', False)",
    "as a text": "TAUGHT = {'torch.distributed.checkpoint._async_executor': teach}",
}
PUBLIC = {
    "op": "import torch\ntorch.ops.aten._conj.default",
    "op by another name": "import torch\naten = torch.ops.aten\naten._softmax",
    "own": "class A:\n    def f(self):\n        self._locals = self._form",
    "version": "import torch\ntorch.__version__",
    "Python's": "import sys\nsys._getframe(1)",
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_private_name_is_found(name: str) -> None:
    assert private_of_torch(ast.parse(PLANTED[name]))


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_none(name: str) -> None:
    assert private_of_torch(ast.parse(PUBLIC[name])) == []


def _imported_anew() -> Any:
    spec = importlib.util.spec_from_file_location("internals_anew", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_torch_lacks_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _imported_anew().REASONS == torch_private.REASONS
    monkeypatch.delattr(torch._C, "_len_torch_function_stack")
    monkeypatch.delattr(torch.fx.Node, "_rename")
    monkeypatch.delattr(torch.compiler, "_is_compiling_flag")
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.raises(ImportError) as raised:
        _imported_anew()
    assert str(raised.value).splitlines() == [
        "torch 2.99.0 lacks 3 of the names that shardlib uses:",
        "  * torch._C._len_torch_function_stack: checked in every call",
        "  * torch.fx.Node._rename: inputs of a graph get the user's names",
        "  * torch.compiler._is_compiling_flag: models read values of masks unless they are compiled",
        "Rule: shardlib runs on torch 2.11, 2.12, 2.13",
        "Remedy: install one of these, or a shardlib for torch 2.99.0",
    ]


def test_every_name_has_a_reason_of_a_line() -> None:
    assert not [name for name, why in torch_private.REASONS.items() if not why or "\n" in why]


@pytest.mark.parametrize("name", torch_private.LATE)
def test_names_that_are_looked_up_late_are_there(name: str) -> None:
    assert torch_private.late(name) is not None


def test_the_op_of_a_custom_op() -> None:
    same = torch.library.custom_op("test_internals::same", Tensor.clone, mutates_args=(), schema="(Tensor x) -> Tensor")
    assert torch_private.op_of_custom(same) is torch.ops.test_internals.same.default


def test_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={torch_private.SUPPORTED[0]}" in project["dependencies"]
    assert torch.__version__.startswith(torch_private.SUPPORTED)
