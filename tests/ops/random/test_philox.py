"""`ops/random/philox.py` against published answers, against Python's integers, and against itself, drawn in parts."""

import itertools
import math

import pytest
import torch

from shardlib.ops.random.philox import Range, bits, keep_mask, philox, threshold, words

# counter words, key words, results: the vectors `philox4x32 10` of Random123's kat_vectors
PUBLISHED = {
    "zeros": ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    "ones": ((2**32 - 1,) * 4, (2**32 - 1,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    "digits of pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
}
CPU = torch.device("cpu")


def hexed(numbers):
    return " ".join(f"{int(n):08x}" for n in numbers)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_answers(name):
    counter, key, want = PUBLISHED[name]
    assert hexed(philox([torch.tensor(c) for c in counter], [torch.tensor(k) for k in key])) == want
    assert hexed(by_hand(counter, key)) == want


def by_hand(counter, key):
    """Philox4x32-10 in Python's integers."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (q >> 32) ^ b ^ k, q % 2**32, (p >> 32) ^ d ^ m, p % 2**32
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    return a, b, c, d


NUMBERS = (0, 1, 5, 2**31, 2**32 - 1, 2**32, 0x0370734413198A2E, 2**63 - 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", [*NUMBERS, 2**63, 2**64 - 1, -1])
def test_an_element_is_one_lane_of_its_block(seed):
    halves = lambda n: (n % 2**32, (n >> 32) % 2**32)
    for counter, index in itertools.product(NUMBERS, NUMBERS):
        want = by_hand((*halves(index >> 2), *halves(counter)), halves(seed))[index & 3]
        assert bits(seed, counter, torch.tensor(index)).item() == want
    if seed < 2**63:
        as_tensors = bits(torch.tensor(seed), torch.tensor(7), torch.arange(9))
        assert torch.equal(as_tensors, bits(seed, 7, torch.arange(9)))


def test_the_docstrings_answer():
    seed, counter, first = 0x299F31D0A4093822, 0x0370734413198A2E, 0x168C234C90FDAA20
    assert hexed(bits(seed, counter, first + torch.arange(4))) == "2fe11a02 572a2f27 2f88763b 78d5e325"


def test_any_shape_and_more_than_a_chunk():
    i = torch.arange(40_000).view(4, 100, 100)
    whole = words(3, 4, i)
    assert whole.shape == (4, 100, 100, 4)
    assert torch.equal(whole[2, 7:9], words(3, 4, i[2, 7:9]))
    assert torch.equal(whole.flatten(), bits(3, 4, torch.arange(160_000)))
    assert words(3, 4, i[:0]).shape == (0, 100, 100, 4)


def test_bits_are_spread_evenly():
    drawn = bits(1, 2, torch.arange(200_000)).double() / 2**32
    assert abs(drawn.mean().item() - 0.5) < 4 / math.sqrt(12 * 200_000)
    assert all(abs((drawn < p).double().mean().item() - p) < 4 * math.sqrt(p * (1 - p) / 2e5) for p in (0.1, 0.5, 0.9))
    others = bits(1, 3, torch.arange(200_000)), bits(2, 2, torch.arange(200_000))
    for other in others:
        both = torch.corrcoef(torch.stack([drawn, other.double()]))[0, 1].item()
        assert abs(both) < 4 / math.sqrt(200_000)


@pytest.mark.parametrize(("dropout", "least"), [(0.0, 0), (0.5, 2**31), (0.1, 429496730), (1 - 2**-33, 2**32)])
def test_threshold(dropout, least):
    assert threshold(dropout) == least


# firsts and sizes of batch, heads, queries, keys; sizes of the whole: heads, queries, keys
PARTS = [
    ((0, 2), (0, 3), (0, 5), (0, 7), (3, 5, 7)),
    ((1, 1), (2, 1), (3, 2), (4, 3), (3, 5, 7)),
    ((1, 1), (0, 2), (1, 3), (3, 4), (3, 5, 8)),
    ((0, 2), (0, 3), (0, 5), (6, 1), (3, 5, 7)),
    ((0, 1), (1, 2), (2, 0), (0, 7), (3, 5, 7)),
    ((0, 1), (1, 2), (2, 1), (5, 0), (3, 5, 7)),
    ((70_000, 1), (60, 2), (1_000_000, 2), (1_000_001, 3), (64, 2**20, 2**20 + 1)),
]


@pytest.mark.parametrize("part", PARTS)
def test_what_attention_keeps_is_drawn_for_elements_of_the_whole(part):
    *ranges, sizes = part
    b, h, s, t = (Range(*r, of) for r, of in zip(ranges, (0, *sizes), strict=True))
    key = torch.tensor([11, 12])
    kept = keep_mask(key, 0.3, b, h, s, t, device=CPU)
    assert kept.shape == (b.size, h.size, s.size, t.size)
    padded = -(-t.total // 4) * 4
    for at in itertools.product(*map(range, kept.shape)):
        i, j, q, k = (r.first + x for r, x in zip((b, h, s, t), at, strict=True))
        index = ((i * h.total + j) * s.total + q) * padded + k
        assert kept[at].item() == (bits(11, 12, torch.tensor(index)).item() >= 0.3 * 2**32)


def test_a_word_at_the_threshold_is_kept():
    one = Range(0, 1, 1)
    word = bits(11, 12, torch.tensor(0)).item()
    for dropout, kept in ((word / 2**32, True), ((word + 1) / 2**32, False)):
        assert keep_mask(torch.tensor([11, 12]), dropout, one, one, one, one, device=CPU).item() is kept


def test_everything_is_kept_without_dropout():
    whole = Range(0, 5, 5)
    assert keep_mask(torch.tensor([1, 2]), 0.0, whole, whole, whole, whole, device=CPU).all()
