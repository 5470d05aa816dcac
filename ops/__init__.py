"""The ops that sharded programs call on a device. Each file has the same parts in the same order:

schema, fake, reference, autograd function, backends, and `choose`, which picks the backend and gives the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def define_op(schema: str, function: Callable[..., Any], fake: Callable[..., Any] | None = None) -> Any:
    """Defines the op `shardlib::<schema>`, computed by `function` on all devices, and returns its overload.

    `fake` makes results without values; without it `function` runs on fake tensors.
    """
    name, parenthesis, signature = schema.partition("(")
    torch.library.define(f"shardlib::{name}", parenthesis + signature)
    torch.library.impl(f"shardlib::{name}", "CompositeExplicitAutograd", function)
    if fake is not None:
        torch.library.register_fake(f"shardlib::{name}", fake)
    return getattr(torch.ops.shardlib, name).default
