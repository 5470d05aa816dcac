"""Small functions of ops, by example."""

from __future__ import annotations

import pytest
import torch

from shardlib.ops.checks import check_index
from shardlib.ops.collectives.transport.cuda_args import FORMS, OPS, Tuning, explain_report, workspace_bytes
from shardlib.ops.collectives.transport.cuda_wire import choose_form
from shardlib.ops.collectives.transport.request import CollectiveRequest
from shardlib.ops.collectives.transport.shm_numbers import ChannelNumbers


@pytest.mark.parametrize(
    ("op", "even", "kind", "text"),
    [
        ("all_gather", True, "", "cuda/packets: a small message: its flags travel in it"),
        ("all_gather", False, "", "cuda: sizes differ: the longest message decides the form"),
        ("all_reduce", True, "max", "the kernels form sums, no max"),
    ],
)
def test_forms_of_cuda_messages(op, even, kind, text):
    request = CollectiveRequest(4 << 10, even, torch.float32, kind, "cuda", 4)
    assert str(choose_form(op, request)) == text


def test_workspace_and_report_of_kernels():
    assert workspace_bytes(2, Tuning(packet_bytes=64, window=1024)) == 68224
    flag = 7 << 24 | (OPS.index("all_gather") * len(FORMS) + FORMS.index("staged")) << 20 | 2  # as `mark` in peers.cuh
    report = [1, 0, 2, 3, 0, 5, flag, 0]
    assert explain_report(report, [8, 9, 10, 11]).splitlines() == [
        "all_gather: rank 10 gave up waiting for rank 11, which is gone, late, or runs other code",
        '(flag "arrived" of CTA 5: call 7 all_gather/staged step 2 was due, none seen)',
    ]


def test_groups_without_a_common_member_share_a_channel_number():
    numbers = ChannelNumbers(2)
    groups = ((0, 1), (2, 3), (0, 2), (0, 1), (0, 3))
    assert [numbers.take(group) for group in groups] == [0, 0, 1, 0, None]
    numbers.drop((0, 1))
    assert (numbers.take((0, 3)), numbers.take((1, 3))) == (None, 1)


def test_an_index_out_of_bounds_is_refused():
    check_index(torch.tensor([0, -100, 3]), 0, 4, -100)
    with pytest.raises(IndexError, match="index 4 is out of bounds for a dim of size 4"):
        check_index(torch.tensor([0, 4]), 0, 4)
