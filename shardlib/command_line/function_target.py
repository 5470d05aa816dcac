"""Loads the function that MODULE:FUNCTION names, and plans what it returns."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

from shardlib.compiler.plan.plan import Plan
from shardlib.core.errors import ShardingError
from shardlib.jit.jit import jit
from shardlib.sharding.mesh.mesh import Mesh

_EXAMPLE = "shardlib plan train:small --mesh data=4, for `def small(): return step, x` in train.py"


def plan_function(target: str, mesh: Mesh) -> Plan:
    """Calls a function inside a mesh and returns the plan of its result: `(step, *args)`, or a plan.

    Raises `ShardingError` for a name that does not exist, and for other results.
    """
    function = load_function(target)
    _refuse_arguments(target, function, ())
    with mesh:
        result = function()
        if isinstance(result, Plan):
            return result
        if not isinstance(result, tuple) or not result or not callable(result[0]):
            raise ShardingError(
                f"{target} returns {type(result).__name__}",
                rule="it returns a function and its arguments, (step, *args), or a plan",
                remedy=_EXAMPLE,
            )
        step, *args = result
        _refuse_arguments(f"the step of {target}", step, args)
        method = step.plan if callable(getattr(step, "plan", None)) else jit(step).plan
        plan = method(*args)
        if not isinstance(plan, Plan):
            raise ShardingError(
                f"the method plan of the step of {target} returns {type(plan).__name__}",
                rule="a step with a method plan returns a plan from it, as jitted functions do",
                remedy=_EXAMPLE,
            )
    return plan


def _refuse_arguments(name: str, function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Raises `ShardingError` if a function does not take these arguments; builtins without a signature say so later."""
    if isinstance(function, BuiltinFunctionType):
        return
    try:
        inspect.signature(function).bind(*args)
    except TypeError as error:
        taken = {0: "no arguments", 1: "1 argument"}.get(len(args), f"{len(args)} arguments")
        raise ShardingError(
            f"{name} is called with {taken}: {error}",
            rule="FUNCTION takes no arguments, and returns a step with all arguments of the step",
            remedy=_EXAMPLE,
        ) from error


def load_function(target: str) -> Callable[[], Any]:
    """Returns the function that `MODULE:FUNCTION` names; modules of the current folder come first."""
    module_name, colon, name = target.partition(":")
    if not colon or not name or not all(map(str.isidentifier, module_name.split("."))) or module_name.endswith(".py"):
        raise ShardingError(
            f"{target!r} is not MODULE:FUNCTION", rule="a module as in `import`, without .py", remedy=_EXAMPLE
        )
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:  # a console script, in contrast to `python -m`, leaves it out
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # a module that the named one imports
        raise ShardingError(
            f"there is no module {module_name!r}",
            [f"{error.name!r} is neither installed nor in {folder}"],
            remedy="run in the folder that holds it, or set PYTHONPATH",
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        names = [key for key, x in vars(module).items() if callable(x) and not key.startswith("_")]
        close = get_close_matches(name, names, n=1)
        raise ShardingError(
            f"{module_name} has no function {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""),
            remedy=_EXAMPLE,
        )
    return function  # type: ignore[no-any-return]
