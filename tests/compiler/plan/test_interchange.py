"""A plan as a `tp_plan` of transformers and as DTensor placements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from tests.helpers.ranks import run_ranks


class Attention(nn.Module):
    """Columns and rows over heads, a norm of each head, and a packed pair of columns behind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.q, self.o = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head_norm, self.head = nn.LayerNorm(4), nn.Linear(8, 16, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed(ids))
        heads = self.head_norm(self.q(x).unflatten(-1, (4, 4)))
        return self.head(x + self.o(heads.flatten(-2)))


COLUMNS_AND_ROWS = {"q.*": "(h=4@tensor _) ...", "o.weight": "_ (h=4@tensor _)"}


def plan_of(specs: Mapping[str, str], tensor: int = 2) -> sl.Plan:
    with sl.Mesh(data=2, tensor=tensor):
        model = sl.parallelize(Attention(), specs, strategy="fsdp")
        plan: sl.Plan = model.forward.plan(torch.zeros(4, 6, dtype=torch.long))
    return plan


STYLES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "nothing": ({}, {}),
    "pairs": (
        COLUMNS_AND_ROWS,
        {"q": "colwise", "o": "rowwise", "head_norm": "replicated_with_grad_allreduce"},
    ),
    "columns without rows": ({"head.weight": "vocab@tensor _"}, {"head": "colwise_gather_output"}),
    "rows without columns": ({"head.weight": "_ embed@tensor"}, {"head": "rowwise_split_input"}),
    "rows of a table": ({"embed.weight": "vocab@tensor _"}, {"embed": "embedding_rowwise"}),
    "columns of a table": ({"embed.weight": "_ embed@tensor"}, {"embed": "embedding_colwise"}),
}


@pytest.mark.parametrize("case", STYLES)
def test_styles(case: str) -> None:
    specs, styles = STYLES[case]
    assert plan_of(specs).to_tp_plan() == styles


def test_styles_of_a_training_step() -> None:
    """Names are those in the module, though it is one argument among others."""
    specs, styles = STYLES["pairs"]
    with sl.Mesh(data=2, tensor=2):
        model = sl.parallelize(Attention(), specs, strategy="fsdp", precision=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters())

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
            model(ids).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        plan = sl.jit(step).plan(model, optimizer, torch.zeros(4, 6, dtype=torch.long))
    assert plan.to_tp_plan() == styles
    placements = plan.to_dtensor_placements()
    assert {"ids", "q.weight", "optimizer.state[model.q.weight]['exp_avg']"} <= placements.keys()


REFUSED = {
    "a part of an axis": (
        {"head.weight": "vocab@tensor:(1)2 _"},
        ["head.weight is 16@tensor:(1)2", "only tensor:(1)2 of tensor"],
    ),
    "two dims": (
        {"head.weight": "vocab@tensor:(1)2 embed@tensor:(2)2"},
        ["only tensor:(1)2 of tensor shards it", "only tensor:(2)2 of tensor shards it"],
    ),
    "chosen sizes": (
        {"head.weight": "vocab@tensor=[6 4 3 3] _"},
        ["head.weight is 16@tensor=[6 4 3 3]", "transformers shards in chunks"],
    ),
    "a norm": ({"norm.weight": "embed@tensor"}, ["norm.weight is 8@tensor", "no style in transformers"]),
    "a bias alone": ({"o.bias": "embed@tensor"}, ["o.bias is 8@tensor"]),
    "another factor": (
        {"q.weight": "(h=4 hd@tensor) _"},
        ["q.weight is (4 4@tensor), 8@data", "to_dtensor_placements"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_layouts_without_a_style(case: str) -> None:
    specs, parts = REFUSED[case]
    with pytest.raises(sl.ShardingError) as error:
        plan_of(specs, tensor=4).to_tp_plan()
    assert [part for part in parts if part not in str(error.value)] == [], error.value


def test_layers_that_differ() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    with sl.Mesh(tensor=2):
        sl.parallelize(layers, {"0.weight": "f@tensor _", "1.weight": "_ f@tensor"})
        plan = layers.forward.plan(torch.zeros(4, 8))
    with pytest.raises(sl.ShardingError, match=r"layers of \* differ: colwise, rowwise, whole"):
        plan.to_tp_plan()


def test_no_such_axis() -> None:
    with pytest.raises(sl.ShardingError, match=r"has no axis 'model':\n  \* its axes are data, tensor"):
        plan_of({}).to_tp_plan("model")


FAMILIES = ("Llama", "Qwen3", "Mixtral", "GPTNeoX")


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_of_transformers(family: str) -> None:
    """Placed by its own table, a model's plan gives that table back, and transformers knows all of its styles."""
    import transformers
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64}
    sizes |= {"num_hidden_layers": 2, "use_cache": False}
    grouped = {"num_key_value_heads": 2} if family != "GPTNeoX" else {}
    more = {"Qwen3": {"head_dim": 8}, "Mixtral": {"num_local_experts": 4}}.get(family, {})
    config = getattr(transformers, f"{family}Config")(**sizes, **grouped, **more)
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    styles = dict(model.tp_plan)
    ids = torch.zeros(4, 16, dtype=torch.long, device="meta")
    with sl.Mesh.abstract(data=2, tensor=2):
        sl.parallelize(model, strategy="fsdp")
        plan = sl.jit(lambda model, ids: model(input_ids=ids, labels=ids).loss).plan(model, ids)
    assert plan.to_tp_plan() == styles
    assert {*styles.values()} <= {*ALL_PARALLEL_STYLES.keys()}


def distributed_alike() -> list[str]:
    """Names of parameters whose shards under DTensor differ from shardlib's."""
    from torch.distributed.tensor import distribute_tensor

    torch.manual_seed(0)
    model = Attention()
    whole = {name: x.detach().clone() for name, x in model.named_parameters()}
    with sl.Mesh(data=2, tensor=2) as mesh:
        specs = COLUMNS_AND_ROWS | {"embed.weight": "_ embed@tensor", "head.weight": "vocab@(data tensor) _"}
        sl.parallelize(model, specs, strategy="fsdp")
        placements = model.forward.plan(torch.zeros(4, 6, dtype=torch.long)).to_dtensor_placements()
        return [
            name
            for name, x in model.named_parameters()
            if not torch.equal(
                distribute_tensor(whole[name], mesh.device_mesh, placements[name]).to_local(), x.to_local()
            )
        ]


@pytest.mark.ranks
def test_placements_give_the_same_shards() -> None:
    assert run_ranks(distributed_alike, 4) == [[]] * 4


def test_layouts_without_placements() -> None:
    with pytest.raises(sl.ShardingError) as error:
        plan_of({"q.weight": "(h=4 hd@tensor) _"}).to_dtensor_placements()
    assert "have no DTensor placements" in str(error.value)
    assert "self.q.weight: dim 0 is (4 4@tensor): axis tensor shards one factor of it" in str(error.value)
