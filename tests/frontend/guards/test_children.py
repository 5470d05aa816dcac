"""The children of objects: their order, their keys, by which they can be replaced, and the names of their places."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from shardlib.frontend.guards.children import children
from shardlib.frontend.guards.place_names import format_place
from shardlib.frontend.side_effects.containers import can_put, put


class Slotted:
    __slots__ = ("a", "empty")

    def __init__(self) -> None:
        self.a = 1


@dataclass(frozen=True)
class Fields:
    a: int = 1
    b: int = 2


class Named(dict[str, int]):
    note = "of the class"

    def __init__(self) -> None:
        super().__init__(k=1)
        self.own = 2


def closing() -> Any:
    a, later = 1, None

    def f(b: int = 2) -> Any:
        return a, b, later

    f.c = 3  # type: ignore[attr-defined]
    return f


CASES: dict[str, tuple[Any, list[str]]] = {
    "a list": ([5, 6], ["[0]", "[1]"]),
    "a deque": (deque([5]), ["[0]"]),
    "a tuple": ((5,), ["[0]"]),
    "a dict": (OrderedDict(a=1, b=2), ["['a']", "['b']"]),
    "a dict by a tensor": ({torch.ones(1): 1}, ["[tensor 0]"]),
    "a view of a dict": (types.MappingProxyType({1: 2}), ["[1]"]),
    "slots": (Slotted(), ["a"]),
    "a frozen dataclass": (Fields(), ["a", "b"]),
    "a dict with attributes": (Named(), ["own", "['k']"]),
    "a partial": (functools.partial(max, 1, key=abs), ["func", "args", "keywords"]),
    "a function": (closing(), ["a", "later", "c", "__defaults__", "__kwdefaults__"]),
    "a class": (Fields, []),
    "a module of Python": (types, []),
    "a number": (5, []),
}


@pytest.mark.parametrize("case", CASES)
def test_children_have_names_and_can_be_replaced(case: str) -> None:
    x, names = CASES[case]
    assert [format_place(name, ()) for _, name, _ in children(x)] == names
    replaceable = [key for key, _, _ in children(x) if can_put(x, key) and case != "a partial"]  # its parts are fixed
    for key in replaceable:
        put(x, key, new := object())
        assert {k: y for k, _, y in children(x)}[key] is new
