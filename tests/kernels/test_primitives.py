"""The primitives on emulated threads: what they compute, when it is seen, and what misuse of them is told."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardlib.ops.random import philox
from tests.kernels import emulate
from tests.kernels.emulate import EmulationError

SOURCE = Path(__file__).with_name("primitives.cu")
HALVES = (torch.bfloat16, torch.float16)


def _library() -> ctypes.CDLL:
    return emulate.library("philox.cuh", driver=SOURCE.read_text())


def _call(name: str, *arguments: object) -> None:
    emulate.call(_library(), f"test_{name}", *arguments)


# --- what they compute ------------------------------------------------------------------------------------------------

WIDTHS = [(torch.bfloat16, 48), (torch.bfloat16, 96), (torch.float16, 128)]


@pytest.mark.parametrize("b_along_n", [False, True])
@pytest.mark.parametrize("a_from", ["k-major", "mn-major", "registers"])
@pytest.mark.parametrize(("dtype", "n"), WIDTHS)
def test_wgmma(dtype: torch.dtype, n: int, a_from: str, b_along_n: bool) -> None:
    torch.manual_seed(n)
    memory = emulate.Memory()
    a, b = torch.randn(64, 64).to(dtype), torch.randn(64, n).to(dtype)
    c = memory.empty(64, n, dtype=torch.float32)
    lies = ["k-major", "mn-major", "registers"].index(a_from)
    left = memory.tensor(a.mT.contiguous() if a_from == "mn-major" else a)
    right = memory.tensor(b if b_along_n else b.mT.contiguous())
    _call("product", int(dtype == torch.float16), n, lies, int(b_along_n), left, right, c)
    memory.check()
    torch.testing.assert_close(c, a.float() @ b.float(), atol=1e-4, rtol=1e-5)


def _tile(x: Tensor, box: tuple[int, ...], at: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Raw bytes of a box of x (sizes and places innermost first), and what storing it at its place makes of ones."""
    memory = emulate.Memory()
    source, target = memory.tensor(x, "source"), memory.tensor(torch.ones_like(x), "target")
    raw = memory.empty(math.prod(box) * x.element_size(), dtype=torch.uint8)
    sizes = (ctypes.c_uint64 * 4)(*reversed(x.shape))
    strides = (ctypes.c_uint64 * 3)(*(s * x.element_size() for s in reversed(x.stride()[:3])))
    places = (ctypes.c_uint32 * 4)(*box), (ctypes.c_int32 * 4)(*at)
    _call("tile", int(x.dtype == torch.float16), sizes, strides, *places, source, target, raw)
    memory.check()
    return raw, target


PLACES = [(0, 0, 0, 0), (8, 3, 1, 1), (-4, -2, 0, 0), (36, 6, 2, 1), (80, 0, 0, 0)]


@pytest.mark.parametrize("at", PLACES, ids=str)
@pytest.mark.parametrize("wide", [16, 32, 64])
def test_tiles(wide: int, at: tuple[int, ...]) -> None:
    """A box may lie partly or wholly outside: zeros are read there, and nothing is written."""
    torch.manual_seed(0)
    for dtype in HALVES:
        x = torch.randn(2, 3, 9, 40).to(dtype)
        box = (wide, 5, 2, 1)
        raw, target = _tile(x, box, at)
        spans = [range(a, a + n) for a, n in zip(at, box, strict=True)]
        grid = list(itertools.product(*reversed(spans)))
        inside = [all(0 <= i < n for i, n in zip(place, x.shape, strict=True)) for place in grid]
        flat = torch.stack([x[place] if ok else x.new_zeros(()) for place, ok in zip(grid, inside, strict=True)])
        chunks = flat.view(torch.uint8).view(-1, 16)
        found = torch.empty_like(chunks)
        for i in range(len(chunks)):
            address = 16 * i
            found[i] = raw.view(-1, 16)[(address ^ (address >> 3) & 0x70) // 16]
        assert torch.equal(found, chunks)
        expected = torch.ones_like(x)
        for place, ok in zip(grid, inside, strict=True):
            if ok:
                expected[place] = x[place]
        assert torch.equal(target, expected)


MAPS = [
    ((72, 5, 1, 1), "box is 144 bytes wide; 16 to 128, by 16"),
    ((4, 5, 1, 1), "box is 8 bytes wide"),
    ((64, 257, 1, 1), "box has 257 elements in dim 1"),
]


@pytest.mark.parametrize(("box", "message"), MAPS)
def test_tensor_maps_are_refused(box: tuple[int, ...], message: str) -> None:
    x = torch.zeros(1, 1, 8, 64).bfloat16()
    _tile(x, (64, 5, 1, 1), (0, 0, 0, 0))
    with pytest.raises(EmulationError, match=message):
        _tile(x, box, (0, 0, 0, 0))


def test_tensor_maps_of_odd_strides_are_refused() -> None:
    with pytest.raises(EmulationError, match="stride of dim 1 is not a multiple of 16"):
        _tile(torch.zeros(1, 1, 8, 60).bfloat16(), (64, 5, 1, 1), (0, 0, 0, 0))


def test_runs_of_floats_are_added() -> None:
    memory = emulate.Memory()
    x, total = memory.tensor(torch.randn(1000)), memory.tensor(torch.full((1000,), 2.0))
    _call("add_run", x, total, 1000)
    memory.check()
    assert torch.equal(total, x + 2)


@pytest.mark.parametrize("b_transposed", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_fragments(dtype: torch.dtype, b_transposed: bool) -> None:
    torch.manual_seed(0)
    memory = emulate.Memory()
    a, b = memory.tensor(torch.randn(16, 16).to(dtype)), torch.randn(16, 16).to(dtype)
    c, back = memory.empty(16, 16, dtype=torch.float32), memory.empty(16, 16, dtype=dtype)
    given = memory.tensor(b.mT.contiguous() if b_transposed else b)
    _call("fragments", int(dtype == torch.float16), a, given, c, back, int(b_transposed))
    memory.check()
    torch.testing.assert_close(c, a.float() @ b.float(), atol=1e-5, rtol=1e-5)
    assert torch.equal(back, a)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_conversions(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()
    torch.manual_seed(0)
    near = torch.cat([every, every.nextafter(torch.tensor(9e9)), every.nextafter(torch.tensor(-9e9))])
    middle = (every[1:] + every[:-1]) / 2
    edges = torch.tensor([65519.0, 65520.0, 1e-8, 3e38, math.inf, -math.inf])
    x = torch.cat([near, middle, torch.randn(5001) * 10, edges])
    x = x[: len(x) // 2 * 2]
    packed, back = torch.zeros(len(x) // 2, dtype=torch.int32), torch.zeros(len(x))
    single = torch.zeros(len(x), dtype=dtype)
    _call("convert", int(dtype == torch.float16), x, packed, back, single, len(x) // 2)
    expected = x.to(dtype)
    torch.testing.assert_close(back, expected.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(single, expected, rtol=0, atol=0, equal_nan=True)
    finite = expected.isfinite()
    assert torch.equal(packed.view(dtype)[finite], expected[finite])


@pytest.mark.parametrize(("seed", "counter", "first"), [(0, 0, 0), (2**40 + 9, 2**33 + 1, 2**36 + 3), (-7, 5, 1)])
def test_random_words(seed: int, counter: int, first: int) -> None:
    out = torch.zeros(64, dtype=torch.int32)
    _call("random_words", seed, counter, first, out)
    expected = philox.bits(seed, counter, torch.arange(first, first + 64))
    assert (out.long() & 0xFFFFFFFF).tolist() == (expected & 0xFFFFFFFF).tolist()


def test_words_between_lanes() -> None:
    out = torch.zeros(32, 5, dtype=torch.int32)
    _call("warp_words", out)
    lane = torch.arange(32)
    elected = out[:, 3]
    assert elected.sum() == 1
    columns = [torch.full((32,), 5), lane // 8 * 8 + 3, lane ^ 9, elected, torch.full((32,), 7)]
    assert out.tolist() == torch.stack(columns, 1).tolist()


# --- when it is seen --------------------------------------------------------------------------------------------------


def _missing(released: bool, seed: int) -> int:
    emulate.configure(_library(), seed=seed)
    data, flag, missing = (torch.zeros(n, dtype=torch.int32) for n in (256, 1, 1))
    _call("send", data, flag, missing, int(released))
    emulate.configure(_library())
    return int(missing)


def test_a_flag_without_a_release_comes_before_its_data() -> None:
    assert all(_missing(True, seed) == 0 for seed in range(8))
    assert any(_missing(False, seed) > 0 for seed in range(8))


def test_a_seed_is_an_order_of_events() -> None:
    def order(seed: int) -> list[int]:
        emulate.configure(_library(), seed=seed)
        found = torch.zeros(8, dtype=torch.int32)
        _call("queue", torch.zeros(1, dtype=torch.int32), found)
        return found.tolist()

    orders = [order(seed) for seed in (1, 2, 3, 1)]
    emulate.configure(_library())
    assert orders[0] == orders[3]
    assert len(set(map(tuple, orders))) == 3
    assert all(sorted(o) == list(range(8)) for o in orders)


@pytest.mark.parametrize("limit", [10**3, 10**10])
def test_a_wait_reaches_its_limit(limit: int) -> None:
    waited = torch.zeros(1, dtype=torch.int64)
    _call("give_up", torch.zeros(1, dtype=torch.int32), limit, waited)
    assert limit <= int(waited) <= 4 * limit + 4096


MISUSE = {
    1: "mbarrier is used before it is initialized",
    2: "more arrivals at an mbarrier than it was initialized for",
    3: r"no progress\n  CTA \(0,0,0\) waits for the mbarrier at shared address 0x400, phase 0: threads 0-127",
    4: r"no progress\n.*waits for named barrier 3 of 128 threads: threads 0-95",
    5: "meet at one barrier with different thread counts",
    6: "a named barrier needs an id below 16",
    7: r"waits for the lanes 0xffffffff of warp 0: threads 0-15",
    8: "lanes of one warp are at different warp operations",
    9: "a lane that its mask leaves out",
    10: "wgmma without a wgmma_fence",
    11: "threads of one warpgroup issue different wgmma operations",
    12: "wgmma reads outside shared memory",
    13: "a matrix row in shared memory that is not aligned to 16 bytes",
    14: "a cp.async outside shared memory",
    15: "cp.async from an unaligned address",
    16: "a 16-byte store to an unaligned address",
    17: "a store ran past the end of shared memory",
    18: "ended before its asynchronous copies were done with its shared memory",
    19: "a bulk copy not aligned to 16 bytes",
    20: r"waits for a flag that it loads in a loop without pause_ns\(\)",
    21: r"no progress\n.*waits for a flag in global memory: threads 0-127",
    23: "registers of wgmma that were not pinned between their last write and the fence",
    24: "registers of wgmma that were not pinned between their last write and the fence",
    25: "registers of wgmma that were not pinned between their last write and the fence",
    26: "a second address of memory is used with no alias fence before",
    27: "a second address of memory was used with no alias fence behind",
}


@pytest.mark.parametrize("what", MISUSE)
def test_misuse_is_told(what: int) -> None:
    memory = emulate.Memory()
    x = memory.tensor(torch.full((2048,), 7, dtype=torch.int32).view(torch.float32))
    _call("misuse", 0, x)  # nothing wrong
    with pytest.raises(EmulationError, match=MISUSE[what]):
        _in_several_orders(what, x)
    emulate.configure(_library())


def _in_several_orders(what: int, x: Tensor) -> None:
    for seed in range(1, 9):  # a copy may be done by chance before its CTA ends
        emulate.configure(_library(), seed=seed)
        _call("misuse", what, x)


def test_accumulators_are_spoiled_until_the_wait() -> None:
    x = torch.zeros(256)
    _call("misuse", 22, x)
    assert x[:128].isnan().all()


# --- the other implementation -----------------------------------------------------------------------------------------


@functools.cache
def _nvcc_log() -> str:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no CUDA compiler (nvcc) on PATH")
    headers = sorted([*emulate.CUDA.glob("device/*.cuh"), *emulate.CUDA.glob("*.cuh"), SOURCE])
    flags = ["-std=c++17", f"-I{emulate.CUDA}", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas=-v"]
    key = emulate.hashed(" ".join(flags).encode(), *(header.read_bytes() for header in headers))
    log = emulate.cache() / f"primitives-{key}.log"
    if not log.exists():
        done = subprocess.run([nvcc, *flags, "-c", str(SOURCE), "-o", "/dev/null"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        log.write_text(done.stdout + done.stderr)
    return log.read_text()


@pytest.mark.long
def test_the_assembler_takes_every_primitive() -> None:
    """No spills, no stack, no remark; every width of wgmma, every form of every instruction."""
    log = _nvcc_log()
    assert "warning" not in log
    assert "C75" not in log  # wgmma that was serialized, setmaxnreg that was ignored
    clean = log.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads")
    assert clean == log.count("bytes stack frame") > 30
