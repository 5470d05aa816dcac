"""`debug_print`: the running program prints values, in program order.

In a traced function a print is an op without results. The passes never drop, merge or reorder such ops: `normalize`
keeps them, and the schedule moves only ops whose results are read. Its operands are gathered; the plan shows the line
and these collectives.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from shardlib.core.context import is_tracing
from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import innermost, pytree
from shardlib.primitives.body import current_body
from shardlib.tensor.sharded_tensor import ShardedTensor

_LIB: Any = torch.library.Library("shardlib", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIB.define("debug_print(str text, Tensor[] xs, *, int lead=1) -> ()")
OP = torch.ops.shardlib.debug_print.default
torch.fx.node.has_side_effect(OP)  # so that torch's own dead code elimination keeps it


def _print(text: str, xs: list[Tensor], *, lead: int = 1) -> None:
    if lead:
        print(text.format(*xs), flush=True)


def _fake(text: str, xs: list[Tensor], *, lead: int = 1) -> None:
    return None


def _vmap(info: Any, in_dims: Any, text: str, xs: list[Tensor], *, lead: int = 1) -> tuple[None, None]:
    for i in range(info.batch_size):
        torch.ops.shardlib.debug_print(
            text, [x if d is None else x.select(d, i) for x, d in zip(xs, in_dims[1], strict=True)], lead=lead
        )
    return None, None


_LIB.impl("debug_print", _print, "CompositeExplicitAutograd")
torch.library.register_fake("shardlib::debug_print", _fake, lib=_LIB)
torch.library.register_vmap("shardlib::debug_print", _vmap, lib=_LIB)


def debug_print(fmt: str, /, *args: Any, **kwargs: Any) -> None:
    """Prints `fmt.format(*args, **kwargs)` with the values of tensors, of any sharding, when the program runs.

    In a jitted function prints come in program order, each once: whole values, on the first rank, once for all virtual
    devices; under `vmap` once for each element. Outside `jit` it prints at once; for a ShardedTensor on ranks that is
    a collective, which every rank must call. Arguments may be pytrees; leaves that are no tensors are formatted during
    the trace. Printing does not change gradients. Sharded values are gathered; the plan shows the bytes.

    Raises `ShardingError` inside a `shard_map` body, and for a format that a tensor of that shape does not take.

    Example:
        >>> import shardlib as sl
        >>> def step(x):
        ...     loss = x.square().sum()
        ...     debug_print("loss {:.1f} of {x}, shape {x.shape}", loss, x=x)
        ...     return loss
        >>> with sl.Mesh(data=2):
        ...     out = sl.jit(step, in_specs=("batch@data",))(torch.arange(4.0))
        loss 14.0 of tensor([0., 1., 2., 3.]), shape torch.Size([4])
    """
    if is_tracing() and current_body() is not None:
        raise ShardingError(
            f"debug_print({fmt!r}) is inside a shard_map body",
            rule="a body is one device's program: its tensors are local, and no device has them whole",
            remedy="return the value and print it outside of the shard_map",
        )
    slots: list[_Slot] = []
    args, kwargs = pytree.tree_map_only(Tensor, lambda x: _Slot(x, slots), (args, kwargs))
    text = fmt.format(*args, **kwargs).replace("{", "{{").replace("}", "}}")
    printed: list[Tensor] = []

    def field(m: re.Match[str]) -> str:
        printed.append(slots[int(m[1])].x)
        return f"{{{len(printed) - 1}{m[2]}}}"

    text = _MARK.sub(field, text)
    ranks = {x.mesh.rank for x in map(innermost, printed) if isinstance(x, ShardedTensor)}
    torch.ops.shardlib.debug_print(text, printed, lead=int(is_tracing() or not any(ranks)))


_MARK = re.compile("\0(\\d+)((?:![rs])?(?::[^\0]*)?)\0")


class _Slot:
    """Stands for a tensor during formatting: formats as a mark for its value, and has its attributes."""

    def __init__(self, x: Tensor, slots: list[_Slot]) -> None:
        self.x, self._slots, self._at = x, slots, len(slots)
        slots.append(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.x, name)

    def __getitem__(self, index: Any) -> _Slot:
        return _Slot(self.x[index], self._slots)

    def __repr__(self) -> str:
        return f"\0{self._at}!r\0"

    def __str__(self) -> str:
        return f"\0{self._at}!s\0"

    def __format__(self, spec: str) -> str:
        if not spec:
            return f"\0{self._at}\0"
        try:
            format(torch.zeros(self.x.shape, dtype=self.x.dtype, device="cpu"), spec) if self.x.dim() else format(
                _NUMBERS[self.x.dtype.is_complex, self.x.dtype.is_floating_point], spec
            )
        except (TypeError, ValueError) as error:
            raise ShardingError(
                f"debug_print cannot write a tensor of shape {list(self.x.shape)} and dtype {self.x.dtype} as {spec!r}",
                [str(error)],
                rule="a tensor of no dims is written as its number is; any other takes no format",
                remedy="write {} for the tensor, or {:.3f} for x.sum()",
            ) from None
        return f"\0{self._at}:{spec}\0"


_NUMBERS = {(False, False): 1, (False, True): 1.0, (True, False): 1j}
