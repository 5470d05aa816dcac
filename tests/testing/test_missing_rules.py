"""The list of ops without a rule."""

from __future__ import annotations

from shardlib.testing.missing_rules import ops_without_rule


def test_lists_ops_that_run_on_whole_operands() -> None:
    missing = ops_without_rule()
    assert {"_fused_moving_avg_obs_fq_helper_functional", "_sparse_softmax"} <= {*missing}
    assert not {"mm", "add.Tensor", "gelu_backward", "silu", "relu_", "linear", "add.out"} & {*missing}
