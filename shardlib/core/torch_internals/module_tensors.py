"""Lists the parameters and buffers that modules hold, and replaces them for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from shardlib.core.torch_internals.torch_private import MODULE_DICTS

ModuleTensor = tuple[dict[str, Any], str, Any]  # a dict of a module, a name in it, and the value there


def module_tensors(objects: Iterable[Any]) -> list[ModuleTensor]:
    """Returns the parameters and buffers that the modules among `objects` hold themselves."""
    dicts = [getattr(x, kind) for x in objects if isinstance(x, nn.Module) for kind in MODULE_DICTS[:2]]
    return [(held, name, x) for held in dicts for name, x in held.items()]


@contextmanager
def replacing(new: Iterable[ModuleTensor]) -> Iterator[None]:
    """While on, dicts of modules hold other values.

    Example:
        >>> m = nn.BatchNorm1d(1)
        >>> with replacing([(held, name, None) for held, name, _ in module_tensors([m])]):
        ...     print(m.weight, m.running_mean)
        None None
    """
    new = list(new)
    before = [(held, name, held[name]) for held, name, _ in new]
    try:
        for held, name, x in new:
            held[name] = x
        yield
    finally:
        for held, name, x in before:
            held[name] = x
