"""Ops that move a value from one stage of a pipeline to another.

In the program of one stage, `send` and `receive` name the other stage and the number of the message. A program of all
stages has `transfer` in their place. The tag of random ops keeps passes from moving, repeating or dropping a receive.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

_LIB: Any = torch.library.Library("shardlib", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIB.define("send(Tensor x, int stage, int number) -> ()")
_LIB.define("receive(int stage, int number) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_LIB.define("transfer(Tensor x, int source, int target) -> Tensor")
SEND = torch.ops.shardlib.send.default
RECEIVE = torch.ops.shardlib.receive.default
TRANSFER = torch.ops.shardlib.transfer.default


def _refuse(*_: Any) -> NoReturn:
    raise RuntimeError("the program of one stage runs on the ranks of that stage")


def _transfer(x: Tensor, source: int, target: int) -> Tensor:
    return x.clone()


for _name in ("send", "receive"):
    _LIB.impl(_name, _refuse, "CompositeExplicitAutograd")
_LIB.impl("transfer", _transfer, "CompositeExplicitAutograd")
torch.library.register_fake("shardlib::send", lambda x, stage, number: None, lib=_LIB)
torch.library.register_fake("shardlib::transfer", _transfer, lib=_LIB)
