"""Programs for device cuda on fake tensors: no mixed device, no hidden read, CUDA's own dtypes, shapes and strides."""

from __future__ import annotations

import pytest

from tests.validation.fakecuda import programs
from tests.validation.fakecuda.__main__ import MODES
from tests.validation.fakecuda.watch import Seen

EVERY = 180  # of the rules' samples; the others are slow
BY_DEVICE = ("_embedding_bag", "log_sigmoid_forward", "log_sigmoid_backward", "native_layer_norm", "view.dtype")
BY_DEVICE += ("_linalg_svd", "logspace.Tensor_Tensor", "scatter.value")


def clean(seen: Seen) -> None:
    assert not seen.faults, "\n".join(dict.fromkeys(seen.faults))
    assert seen.counts["collectives"] == seen.counts["waits"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.range is deprecated")
def test_some_of_the_rules_samples() -> None:
    seen = Seen()
    for sample in list(programs.samples())[::EVERY]:
        programs.run_sample(seen, sample, 2)
    clean(seen)
    assert seen.counts["samples"] > 10


@pytest.mark.sampled(4, first=1)
@pytest.mark.parametrize("name", BY_DEVICE)
def test_what_a_device_decides(name: str) -> None:
    seen = Seen()
    for sample in [s for s in programs.samples() if s[0] == name][::3]:
        programs.run_sample(seen, sample, 3)
    clean(seen)
    assert seen.counts["results"]


@pytest.mark.slow  # about half an hour on one core
@pytest.mark.parametrize("part", range(20))
def test_all_of_the_rules_samples(part: int) -> None:
    seen = Seen()
    for sample in list(programs.samples())[part::20]:
        programs.run_sample(seen, sample, 6)
    clean(seen)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("name", programs.EAGER)
def test_eager(name: str, rank: int | None) -> None:
    seen = Seen()
    programs.run_eager(seen, name, rank)
    clean(seen)
    assert seen.counts["ops"]


FAST = {("fsdp_tp", 5)}
W1 = [pytest.param(n, r, marks=[] if (n, r) in FAST else pytest.mark.slow) for n in MODES for r in (None, 5)]


@pytest.mark.long
@pytest.mark.parametrize(("name", "rank"), W1)
def test_w1(name: str, rank: int | None) -> None:
    seen = Seen()
    programs.run_w1(seen, name, rank)
    clean(seen)
    assert seen.counts["programs"] == 2
    assert rank is None or seen.counts["collectives"]


@pytest.mark.parametrize(
    ("name", "rank"),
    [pytest.param(n, r, marks=pytest.mark.slow) for n in programs.MODELS for r in (None, 5)],
)
def test_models(name: str, rank: int | None) -> None:
    pytest.importorskip("transformers")
    seen = Seen()
    programs.run_model(seen, name, rank)
    clean(seen)
    assert seen.counts["programs"] == 1


@pytest.mark.long
@pytest.mark.sampled(11)
@pytest.mark.parametrize("rank", [None, 1])
@pytest.mark.parametrize("name", programs.OPTIMIZERS)
def test_training(name: str, rank: int | None) -> None:
    seen = Seen()
    programs.run_training(seen, name, rank)
    clean(seen)


@pytest.mark.long
@pytest.mark.parametrize("rank", [None, 1])
def test_state_in_the_memory_of_the_host(rank: int | None) -> None:
    seen = Seen()
    programs.run_training(seen, "AdamW", rank, ["moments", "parameters"])
    clean(seen)


@pytest.mark.parametrize("rank", [None, 1])
def test_numbers_on_the_cpu(rank: int | None) -> None:
    seen = Seen()
    programs.run_numbers(seen, rank)
    clean(seen)
    assert seen.counts["results"] == 1
