"""Reads and prints graphs of ATen ops as text, so that tests of rewrites are text.

    x: f32[8, 4]
    w: f32[4, 6]
    mm = aten.mm(x, w)
    return mm

An op without an overload is its `default` one. Arguments are names, literals, `torch.float32` or `device('cpu')`.
"""

from __future__ import annotations

import ast
import operator
import re
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from shardlib.tensor.tensor_meta import short_dtype

_DTYPES = {short_dtype(x): x for x in vars(torch).values() if isinstance(x, torch.dtype)}
_NAMES = {"torch": torch, "inf": float("inf"), "nan": float("nan"), "device": torch.device}


def parse_graph(text: str) -> fx.GraphModule:
    """Returns the graph of a text, with fake values in `meta["val"]`; raises ValueError for another text."""
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    with FakeTensorMode():
        for line in filter(None, (_drop_comment(line) for line in text.splitlines())):
            if match := re.fullmatch(r"(\w+): (\w+)\[(.*)\]", line):
                name, dtype, sizes = match.groups()
                node = graph.placeholder(name)
                val: Any = torch.empty(ast.literal_eval(f"[{sizes}]"), dtype=_DTYPES[dtype])
            elif match := re.fullmatch(r"(\w+) = ([\w.]+)\((.*)\)", line):
                name, op, arguments = match.groups()
                args, kwargs = eval(f"(lambda *args, **kwargs: (args, kwargs))({arguments})", _NAMES | nodes)
                node = graph.create_node("call_function", _find_op(op), args, kwargs, name)
                args, kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
                val = node.target(*args, **kwargs)
            elif match := re.fullmatch(r"return (.*)", line):
                node = graph.output(eval(f"({match[1]},)", _NAMES | nodes))
                node.meta["line"] = None
                continue
            else:
                raise ValueError(f"{line!r} is no line of a graph")
            node.meta.update(val=val, line=None)
            nodes[name] = node
    return fx.GraphModule({}, graph)


def show_graph(gm: fx.GraphModule) -> str:
    """Returns the graph's text, which `parse_graph` reads."""
    lines = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            val = node.meta["val"]
            lines.append(f"{node.name}: {short_dtype(val.dtype)}{list(val.shape)}")
        elif node.op == "call_function":
            args = ", ".join([*map(_show, node.args), *(f"{k}={_show(v)}" for k, v in node.kwargs.items())])
            lines.append(f"{node.name} = {_show_op(node.target)}({args})")
        else:
            assert node.op == "output", f"{node.name} is a {node.op}"
            lines.append(f"return {', '.join(map(_show, node.args[0]))}")
    return "\n".join(lines)


def _drop_comment(line: str) -> str:
    return line.partition("#")[0].strip()


def _find_op(text: str) -> Any:
    if text == "getitem":
        return operator.getitem
    op = operator.attrgetter(text)(torch.ops)
    return op.default if isinstance(op, torch._ops.OpOverloadPacket) else op


def _show_op(target: Any) -> str:
    return "getitem" if target is operator.getitem else str(target).removesuffix(".default")


def _show(x: Any) -> str:
    if isinstance(x, list | tuple):
        return f"[{', '.join(map(_show, x))}]"
    return f"device({str(x)!r})" if isinstance(x, torch.device) else repr(x)
