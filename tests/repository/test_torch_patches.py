"""`docs/torch_patches.md` lists every file that replaces a part of torch, or hooks into it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import shardlib

PACKAGE = Path(shardlib.__file__).parent
TABLE = Path(__file__).parents[2] / "docs" / "torch_patches.md"
HELPERS = {"replaces", "when_imported", "holding", "reenter_modes"}  # functions of shardlib that install a patch
MODES = {"TorchFunctionMode", "TorchDispatchMode", "PersistentFunctionMode"}
PROTOCOLS = {"__torch_function__", "__torch_dispatch__"}
HOOKS = re.compile(r"register_\w*hook|push_saved_hooks|saved_tensors_hooks")


def find_patches(source: str) -> Iterator[tuple[int, str]]:
    """Yields the lines that patch torch or register a hook with it, each with the code that does."""
    tree = ast.parse(source)
    torch_names = set(_torch_names(tree))
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets) if any(_is_patched(target, torch_names) for target in targets):
                yield node.lineno, ast.unparse(targets[0])
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target) if _is_patched(target, torch_names):
                yield node.lineno, ast.unparse(target)
            case ast.Call(func=function, args=args):
                name = _last_name(function)
                sets = name in ("setattr", "delattr") and args and _root(args[0]) in torch_names
                restores = name == "callback" and any(_last_name(x) == "setattr" for x in args)
                if sets or restores or name in HELPERS or HOOKS.fullmatch(name):
                    yield node.lineno, ast.unparse(node)
            case ast.ClassDef(bases=bases) if any(_last_name(base) in MODES for base in bases):
                yield node.lineno, node.name
            case ast.FunctionDef(name=name) if name in PROTOCOLS:
                yield node.lineno, name


def _torch_names(tree: ast.Module) -> Iterator[str]:
    """Yields the names of a module's own that stand for torch, for its modules, and for what these hold."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    yield alias.asname or "torch"
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == "torch":
            yield from (alias.asname or alias.name for alias in node.names)


def _is_patched(target: ast.expr, torch_names: set[str]) -> bool:
    if isinstance(target, ast.Name):  # in the body of a class
        return target.id in PROTOCOLS
    if not isinstance(target, ast.Attribute):
        return False
    is_slot = target.attr == "value" and isinstance(target.value, ast.Name) and target.value.id.isupper()
    return is_slot or target.attr in PROTOCOLS or _root(target) in torch_names


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def test_every_patch_is_in_the_table() -> None:
    listed = set(re.findall(r"^\| `([\w/]+\.py)` \|", TABLE.read_text(), re.MULTILINE))
    patching = {
        str(path.relative_to(PACKAGE)): found
        for path in sorted(PACKAGE.rglob("*.py"))
        if (found := list(find_patches(path.read_text())))
    }
    assert {path: found for path, found in patching.items() if path not in listed} == {}
    assert [path for path in sorted(listed) if not (PACKAGE / path).exists()] == []
    assert sorted(listed - patching.keys()) == []


def test_planted_patches_are_found() -> None:
    source = """
import torch
import torch.nn.functional as F
from torch.optim import Adam
torch.from_numpy = None
F.softmax = None
Adam.step = None
setattr(torch.nn, "Linear", None)
ENGINE.value = None
stack.callback(setattr, kind, "step", kind.step)
torch.nn.modules.module.register_module_forward_hook(None)
with SLOT.holding(None): ...
class Mode(TorchFunctionMode): ...
class Tensor:
    __torch_function__ = None
@replaces("torch.save")
def save(original): ...
x = torch.zeros(3)
x.grad = None
self.value = 3
"""
    assert sorted(line for line, _ in find_patches(source)) == [5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16]
