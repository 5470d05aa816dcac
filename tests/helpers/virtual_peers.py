"""Makes peers whose ranks are all in this process, on one device."""

from __future__ import annotations

import torch

from shardlib.ops.collectives.transport.cuda_args import MAX_CTAS, Tuning, workspace_bytes
from shardlib.ops.collectives.transport.cuda_peers import Launch, Peers, launch, load_tuning, make_group, make_report


def virtual_peers(
    ranks: int,
    device: torch.device | str = "cuda",
    tuning: Tuning | None = None,
    *,
    present: range | None = None,
    seconds: float = 10.0,
    multicast: bool = False,
    launch: Launch = launch,
) -> Peers:
    """Makes peers whose ranks are all on one device, each with its own workspace.

    With `present`, the other ranks never join. `multicast` is for the emulation, which does not use the address.
    """
    tuning = tuning or load_tuning()
    present = present or range(ranks)
    spaces = [torch.zeros(workspace_bytes(ranks, tuning), dtype=torch.uint8, device=device) for _ in range(ranks)]
    report = make_report(len(present), torch.device(device))
    group = make_group(ranks, present, tuning, seconds, [x.data_ptr() for x in spaces], report)
    group.multicast = spaces[0].data_ptr() if multicast else 0
    peers = Peers(group, range(ranks), tuning, report, launch)
    peers.memory += spaces
    if torch.device(device).type == "cuda":  # all ranks must run at once, one CTA per multiprocessor
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        peers.most_ctas = min(MAX_CTAS, multiprocessors // len(present))
    return peers
