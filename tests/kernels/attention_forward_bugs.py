"""Bugs planted into attention_forward.cu and what it includes, each with the case that sees it."""

from __future__ import annotations

from tests.kernels.bugs import Bug
from tests.kernels.emulate import Patch

SOURCE = "attention_forward.cu"

# What a mutant is compiled for: one kernel instead of fourteen.
ENTRY = "return args->dtype == SHARDLIB_BF16 ? choose<bf16>(*args, stream) : choose<fp16>(*args, stream);"
_PLAIN = Patch(SOURCE, ENTRY, "return run<bf16, 128, false>(*args, stream);")
_GENERAL = Patch(SOURCE, ENTRY, "return run<bf16, 64, true>(*args, stream);")
ONLY = {
    **dict.fromkeys(("causal tiles", "window of tiles", "tiles that see nothing", "sharp tiles"), (_PLAIN,)),
    **dict.fromkeys(
        ("alibi in tiles", "bias", "mask of heads", "dropout in tiles", "grouped causal alibi"), (_GENERAL,)
    ),
}
_DROP = "if (p.extras.key) drop(scores, p.extras, extras, tile * C::Keys + column);"
ROWS, RING, SHARED, PANELS = "attention_rows.cuh", "attention_ring.cuh", "attention.cuh", "attention_tiles.cuh"
BUGS: dict[str, Bug] = {
    # waiting
    "scores are read before they are there": Bug("turn.pass();\n    wgmma_wait<1>();", "turn.pass();", "causal tiles"),
    "o is scaled while values are added": Bug(
        "const float2 shrink = softmax(scores, rows, p.scale_log2);\n    wgmma_wait<0>();",
        "const float2 shrink = softmax(scores, rows, p.scale_log2);",
        "causal tiles",
    ),
    "keys are not waited for": Bug("barrier_wait(&ring.full[ring.stage], ring.phase);", "", "causal tiles", RING),
    "the producer does not wait for a free stage": Bug(
        "barrier_wait(&ring.empty[ring.stage], ring.phase ^ 1);", "", "causal tiles", RING
    ),
    "the producer waits for the wrong phase": Bug(
        "barrier_wait(&ring.empty[ring.stage], ring.phase ^ 1);",
        "barrier_wait(&ring.empty[ring.stage], ring.phase);",
        "causal tiles",
        RING,
    ),
    "the phase never flips": Bug("stage = 0, phase ^= 1;", "stage = 0;", "causal tiles", RING),
    "the next queries overwrite o": Bug("bulk_wait_read<0>();", "", "causal tiles"),
    "queries are not waited for": Bug("barrier_wait(s.q_full, q_phase);", "", "causal tiles"),
    "fewer bytes are expected": Bug(
        "barrier_arrive_expect(full, C::KvBytes);", "barrier_arrive_expect(full, C::KvBytes / 2);", "causal tiles", RING
    ),
    "o is stored before all of it is written": Bug("named_barrier_sync(kOutput + group, 128);", "", "causal tiles"),
    "a turn is not passed on": Bug(
        "issue_values<T, C>(o, probabilities, full_stage(v, v_tile));\n    turn.pass();",
        "issue_values<T, C>(o, probabilities, full_stage(v, v_tile));",
        "causal tiles",
    ),
    "a stage of values is never released": Bug(
        "wgmma_pin(o);\n  release_stage(v);\n}", "wgmma_pin(o);\n  v.next();\n}", "causal tiles"
    ),
    "the probabilities are not pinned": Bug("wgmma_pin(probabilities);", "", "causal tiles"),
    # addresses
    "the queries' descriptor advances too far": Bug(
        "q + ((step / 4 * C::QPanel + inside) >> 4)", "q + ((step / 4 * C::QPanel + 2 * inside) >> 4)", "causal tiles"
    ),
    "the values' descriptor does not advance": Bug("v + ((step * 2048) >> 4)", "v", "causal tiles"),
    "every panel is the first": Bug("full, panel * 64, row", "full, 0, row", "causal tiles", PANELS),
    "the wrong key head": Bug("work.head / p.kv_group", "work.head % 2", "grouped causal alibi"),
    "lse beyond the last query": Bug("lane % 4 == 0 && row + 8 * r < p.sight.queries", "lane % 4 == 0", "causal tiles"),
    "o is swizzled by the wrong row": Bug("(chunk ^ my_row % 8)", "(chunk ^ my_row / 8 % 8)", "causal tiles"),
    # numbers
    "o is not scaled": Bug("    scale_rows(o, shrink);\n", "", "causal tiles"),
    "scores are added to the last ones": Bug("step > 0);", "true);", "sharp tiles"),
    "lse in units of log 2": Bug("log2_approx(rows.sum[r])) * kLn2", "log2_approx(rows.sum[r]))", "causal tiles", ROWS),
    "sums of a quarter of the row": Bug(
        "rows.sum[r] += __shfl_xor_sync(kFullMask, rows.sum[r], 2);", "", "causal tiles", ROWS
    ),
    "a row that saw nothing": Bug(
        "maximum == SHARDLIB_MINUS_INFINITY ? 0.0f : maximum * scale_log2",
        "maximum * scale_log2",
        "tiles that see nothing",
        ROWS,
    ),
    # sight
    "causal sees one key more": Bug("last = i + shift + 1;", "last = i + shift + 2;", "causal tiles", SHARED),
    "a window of one key more": Bug("i + shift - window + 1 : 0", "i + shift - window : 0", "window of tiles", SHARED),
    "a tile at the edge taken for a whole one": Bug(
        "j + columns <= end(i)", "j + columns <= end(i + rows - 1)", "causal tiles", SHARED
    ),
    "rows that see nothing are left alone": Bug(
        "write_nothing<T, C>(p, work, group);\n      continue;", "continue;", "tiles that see nothing"
    ),
    # features
    "alibi upwards": Bug("logit -= row.slope_log2", "logit += row.slope_log2", "alibi in tiles", SHARED),
    "a bias in the wrong units": Bug("e.bias_strides[3]) * kLog2E", "e.bias_strides[3])", "bias", SHARED),
    "a mask of the wrong head": Bug("h * e.mask_strides[1]", "b * e.mask_strides[1]", "mask of heads", SHARED),
    "the wrong word of Philox": Bug(
        "second = philox_word(words, unsigned((position + 1) & 3))",
        "second = philox_word(words, unsigned(position & 3))",
        "dropout in tiles",
        SHARED,
    ),
    "dropout in the sum": Bug(
        f"scale_rows(o, softmax(scores, rows, 1.0f));\n    {_DROP}",
        f"{_DROP}\n    scale_rows(o, softmax(scores, rows, 1.0f));",
        "dropout in tiles",
    ),
    "nine rounds of Philox": Bug("round < 10", "round < 9", "dropout in tiles", "philox.cuh"),
}
