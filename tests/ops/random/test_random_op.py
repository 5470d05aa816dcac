"""`ops/random/op.py`: the same numbers in any part and by any backend, of the distribution that they are said to
have."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from shardlib.build.build_recipe import Missing
from shardlib.core.errors import ShardingError
from shardlib.ops import native_libs
from shardlib.ops.random import host as random_host
from shardlib.ops.random import op as draw
from shardlib.ops.random.distributions import KINDS
from shardlib.ops.random.philox import bits

CPU = torch.device("cpu")
FLOATS = (torch.float32, torch.float64)
DTYPES = {"word": (torch.int64,), "long": (torch.int64,), "bernoulli": (torch.bool, *FLOATS)}
EVERY = [(kind, dtype) for kind in KINDS for dtype in DTYPES.get(kind, FLOATS)]
P = {"bernoulli": 3 << 30}


def digits(kind, dtype):
    return {"uniform": 24 if dtype == torch.float32 else 53}.get(kind, P.get(kind, 0))


def reference(kind, dtype, size, first=None, whole=None, seed=5, counter=6):
    first, whole = first or [0] * len(size), whole or size
    p = digits(kind, dtype)
    return draw.reference(seed, counter, kind, size, first, whole, dtype=dtype, device=CPU, p=p)


def host(kind, dtype, size, first=None, whole=None, seed=5, counter=6):
    if isinstance(reason := native_libs.host(), Missing):
        pytest.skip(f"the host library: {reason}")
    first, whole = first or [0] * len(size), whole or size
    return random_host.draw(seed, counter, kind, size, first, whole, dtype=dtype, p=digits(kind, dtype))


WAYS = {"torch": reference, "host": host}

PARTS = [  # size, first, whole
    ([7], [2], [11]),
    ([1], [10], [11]),
    ([0], [11], [11]),
    ([3, 5], [1, 0], [4, 5]),
    ([4, 2], [0, 3], [4, 5]),
    ([2, 3, 2], [1, 0, 4], [3, 3, 6]),
    ([2, 0, 2], [1, 3, 4], [3, 3, 6]),
    ([2, 3, 300], [0, 1, 700], [2, 4, 1001]),
    ([], [], []),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "dtype"), EVERY)
def test_a_part_has_the_numbers_of_the_whole(kind, dtype, way):
    for size, first, whole in PARTS:
        part = WAYS[way](kind, dtype, size, first, whole)
        assert part.shape == torch.Size(size)
        assert part.dtype == dtype
        want = reference(kind, dtype, whole)
        for d, (n, begin) in enumerate(zip(size, first, strict=True)):
            want = want.narrow(d, begin, n)
        assert torch.equal(part, want)


@pytest.mark.parametrize("way", WAYS)
def test_more_elements_than_32_bits_count(way):
    at, flat = [70_000, 999_999], 70_000 * 10**6 + 999_999
    part = WAYS[way]("word", torch.int64, [1, 1], at, [100_000, 1_000_000])
    assert part.item() == bits(5, 6, torch.tensor(flat)).item()


@pytest.mark.parametrize(("kind", "dtype"), EVERY)
def test_backends_agree_to_the_last_bit(kind, dtype):
    """Also where a vector ends: rows of every length up to beyond the blocks that are drawn together."""
    whole = reference(kind, dtype, [200_003])
    assert torch.equal(host(kind, dtype, [200_003]), whole)
    for n in (*range(1, 40), 255, 256, 257, 300):
        assert torch.equal(host(kind, dtype, [n], [n], [200_003]), whole[n : 2 * n])


def test_extreme_words():
    """Where a uniform number is rounded to 1, and where an angle is a multiple of a quarter turn."""
    from shardlib.ops.random.distributions import compute_values

    top = 2**32 - 1
    words = torch.tensor(list(itertools.product((0, 1, 2**31 - 1, 2**31, 3 << 30, top), repeat=4)))
    for kind, dtype in itertools.product(("exponential", "normal", "cauchy"), FLOATS):
        drawn = compute_values(kind, dtype, words, 0)
        assert drawn.isfinite().all()
        assert kind != "exponential" or drawn.min() > 0
    assert compute_values("uniform", torch.float32, words, 24).max() < 1
    assert compute_values("uniform", torch.float32, words, 8).max() == 1 - 2**-8


def test_words_are_those_of_philox():
    assert torch.equal(reference("word", torch.int64, [9], [3], [20]), bits(5, 6, torch.arange(3, 12)))
    long = reference("long", torch.int64, [5])
    low, high = bits(5, 6, torch.arange(0, 10, 2)), bits(5, 6, torch.arange(1, 10, 2))
    assert torch.equal(long, (high << 31) | (low >> 1))


# The first four numbers of seed 5 and counter 6, so that no machine and no release draws others.
PINNED = {
    "normal": (
        "0x1.a612f00000000p+0 -0x1.30e0e60000000p+1 0x1.a205b60000000p-3 0x1.786be60000000p-2",
        "0x1.1f1e27ef1c4eap-2 0x1.028b5ab2f058fp-1 -0x1.8c754c9b1e6f9p+0 0x1.3f6228a39a20fp+1",
    ),
    "exponential": (
        "0x1.0c87c20000000p+2 0x1.559e5c0000000p-3 0x1.6a11640000000p-4 0x1.c6a22e0000000p+0",
        "0x1.559e56f22bd60p-3 0x1.c6a22e0fc3350p+0 0x1.13fa46cd4f45cp+2 0x1.1560c49eb4f57p+0",
    ),
    "cauchy": (
        "0x1.83d8180000000p-5 -0x1.0c49a20000000p-1 -0x1.16c1a20000000p-2 0x1.2d57400000000p-1",
        "-0x1.0c49a14942e3fp-1 0x1.2d573f6e1c54bp-1 0x1.592faa19e933fp-5 0x1.cc308f6224902p+0",
    ),
    "uniform": (
        "0x1.ed73000000000p-7 0x1.b1569a0000000p-1 0x1.d4af240000000p-1 0x1.5ac9180000000p-3",
        "0x1.b1569aa607b5cp-1 0x1.5ac91f3f52bc8p-3 0x1.b73eaf8946740p-7 0x1.5a873362fd744p-2",
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", PINNED)
def test_numbers_stay_what_they_are(kind, way):
    for dtype, want in zip(FLOATS, PINNED[kind], strict=True):
        assert [x.hex() for x in WAYS[way](kind, dtype, [4]).tolist()] == want.split()


# --- distributions ----------------------------------------------------------------------------------------------------

CDF = {
    "uniform": lambda x: x.clamp(0, 1),
    "normal": torch.special.ndtr,
    "exponential": lambda x: -torch.expm1(-x),
    "cauchy": lambda x: torch.atan(x) / math.pi + 0.5,
}


def kolmogorov_smirnov(x, cdf):
    """The largest distance between the distribution of `x` and `cdf`, times sqrt(n); above 1.95 once in a thousand."""
    n = len(x)
    at = cdf(x.double().sort().values)
    step = torch.arange(n + 1, dtype=torch.float64) / n
    return float(torch.maximum((at - step[:-1]).abs(), (step[1:] - at).abs()).max() * math.sqrt(n))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", CDF)
def test_distribution(kind, dtype):
    x = reference(kind, dtype, [40_000])
    assert kolmogorov_smirnov(x, CDF[kind]) < 1.95
    assert all(kolmogorov_smirnov(x[lane::4], CDF[kind]) < 1.95 for lane in range(4))
    assert kolmogorov_smirnov(x * 1.05 + 0.02, CDF[kind]) > 1.95  # the test can tell


@pytest.mark.parametrize("dtype", FLOATS)
def test_moments_and_independence(dtype):
    n = 200_000
    x = reference("normal", dtype, [n]).double()
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((x**power).mean().item() - moment) < 4 * math.sqrt(spread / n)
    others = {
        "the next element": x.roll(1),
        "the element after it": x.roll(2),
        "its square": x.roll(1).square() - 1,
        "another counter": reference("normal", dtype, [n], counter=7).double(),
        "another seed": reference("normal", dtype, [n], seed=6).double(),
    }
    for name, y in others.items():
        assert abs(torch.corrcoef(torch.stack([x, y]))[0, 1].item()) < 4 / math.sqrt(n), name


@pytest.mark.parametrize("dtype", [torch.bool, *FLOATS])
def test_bernoulli(dtype):
    x = reference("bernoulli", dtype, [200_000])
    assert x.double().unique().tolist() == [0, 1]
    assert abs(x.double().mean().item() - 0.75) < 4 * math.sqrt(0.75 * 0.25 / 200_000)


# --- the op -----------------------------------------------------------------------------------------------------------

WRONG = {
    "there is no kind 'gauss'": ("gauss", [2], [0], [2], torch.float32),
    "normal numbers are not drawn as torch.int64": ("normal", [2], [0], [2], torch.int64),
    "word numbers are not drawn as torch.float32": ("word", [2], [0], [2], torch.float32),
    "size, first and whole have an entry for every dim": ("normal", [2], [0, 0], [2], torch.float32),
    "a part of size [2] at [1] does not lie in [2]": ("normal", [2], [1], [2], torch.float32),
    "elements are too many": ("normal", [2, 1], [0, 0], [2**31, 2**31], torch.float32),
}


@pytest.mark.parametrize("text", WRONG)
def test_what_does_not_fit(text):
    kind, size, first, whole, dtype = WRONG[text]
    with pytest.raises(ShardingError) as e:
        torch.ops.shardlib.draw(torch.tensor(1), None, 2, kind, size, first, whole, dtype=dtype, device=CPU)
    assert "draw does not fit" in str(e.value)
    assert text in str(e.value)


def test_a_backend_may_be_asked_for(monkeypatch):
    def draws():
        how = {"dtype": torch.float32, "device": CPU}
        return torch.ops.shardlib.draw(torch.tensor(1), None, 2, "normal", [99], [0], [99], **how)

    one = draws()
    monkeypatch.setenv("SHARDLIB_OPS", "random=torch")
    assert draw.choose(CPU).backend == "torch"
    assert torch.equal(draws(), one)
    monkeypatch.setenv("SHARDLIB_OPS", "random=host")
    assert torch.equal(draws(), one)
    with pytest.raises(ShardingError, match="meta is not the CPU"):
        draw.choose(torch.device("meta"))


def test_schema_and_fake():
    args = (torch.tensor(1), None, 2, "normal", [3, 4], [1, 0], [5, 4])
    torch.library.opcheck(
        torch.ops.shardlib.draw.default,
        args,
        {"dtype": torch.float32, "device": CPU},
        test_utils=("test_schema", "test_faketensor"),
    )
    torch.library.opcheck(
        torch.ops.shardlib.numbered_key.default, (torch.tensor(1), 5), test_utils=("test_schema", "test_faketensor")
    )


def test_only_the_first_device_decides_the_key():
    generator = torch.Generator()
    number = draw.generator_number(generator)
    assert draw.generator_number(generator) == number > 0 == draw.generator_number(None)

    def key(**how):
        generator.manual_seed(3)
        found = draw.call_key(number, device=CPU, **how).item()
        return found, torch.equal(generator.get_state(), torch.Generator().manual_seed(3).get_state())

    drawn, untouched = key()
    assert 0 < drawn < draw.KEYS
    assert not untouched
    assert key(lead=0) == (0, True)  # another device draws it, in this process
    assert key(lead=0, apart=True) == (0, False)
    assert key(lead=1, apart=True) == (drawn, False)
