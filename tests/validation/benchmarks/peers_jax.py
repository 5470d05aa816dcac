"""The peer JAX: W1 under `jax.jit` with NamedShardings, on 8 host devices, in a process of its own.

`python -m tests.validation.benchmarks.peers_jax --mode tp --layers 2` prints one line of JSON: seconds to trace, lower
and compile, and of CPU time for all three; how far the losses of three steps are from plain torch's; bytes on the wire
counted in the compiled module.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from typing import Any

import torch

from tests.models import w1

from .timing import apart

DEVICES = 8
CHECKED_STEPS = 3


def launch(mode: str, layers: int, *, timeout: float = 600.0) -> dict[str, Any]:
    """Run this module in a subprocess and return what it measured."""
    env = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", __name__, "--mode", mode, "--layers", str(layers)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=timeout, check=True)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def placement(spec: str, mode: w1.Mode) -> tuple[str | tuple[str, ...] | None, ...]:
    """The mesh axes of every dim of a spec."""

    def axis(dim: str) -> str | tuple[str, ...] | None:
        name, _, written = dim.partition("@")
        return written or mode.rules.get(name)

    return tuple(axis(dim) for dim in spec.split())


def wire_bytes(module: str) -> float:
    """Bytes that a device sends in a compiled HLO module, every collective a ring algorithm."""
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    total = 0.0
    for result, kind, rest in re.findall(rf"= (\(?[a-z]\w*\[.*?) ({kinds})(?:-start)?\((.*)", module):
        size = 0.0
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", result):
            width = 1 if dtype == "pred" else int(re.sub(r"\D", "", dtype)) // 8
            size += width * math.prod(int(n) for n in dims.split(",") if n)
        n = 2 if kind == "collective-permute" else _group(rest)
        per_byte = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1, "collective-permute": 1.0}
        total += size * per_byte.get(kind, (n - 1) / n)
    return total


def _group(attributes: str) -> int:
    """Devices that take part in one collective together; HLO writes its groups in three ways."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return len(listed[1].split(","))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(iota[1])
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2])
        return math.prod(int(part or sizes[axis]) for axis, part in parts)
    raise ValueError(f"no replica groups in: {attributes[:200]}")


def measure(mode_name: str, config: w1.Config) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    mode = w1.modes(config, DEVICES)[mode_name]
    mesh = jax.make_mesh(tuple(mode.axes.values()), tuple(mode.axes), axis_types=(AxisType.Auto,) * len(mode.axes))

    def sharding(spec: str) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*placement(spec, mode)))

    def norm(x: Any, weight: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + config.eps) * weight

    def residual(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, sharding(mode.residual)) if mode.residual else x

    def rotate(x: Any, cos: Any, sin: Any) -> Any:
        first, second = jnp.split(x, 2, axis=-1)
        return x * cos + jnp.concatenate([-second, first], axis=-1) * sin

    def attention(x: Any, layer: Any, cos: Any, sin: Any, mask: Any) -> Any:
        b, s, _ = x.shape
        q, k, v = ((x @ layer[name].T).reshape(b, s, -1, config.head_size) for name in ("wq", "wk", "wv"))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q = q.reshape(b, s, config.kv_heads, -1, config.head_size)
        scores = jnp.einsum("bqkge,btke->bkgqt", q, k) / math.sqrt(config.head_size)
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
        mixed = jnp.einsum("bkgqt,btke->bqkge", weights, v)
        return mixed.reshape(b, s, -1) @ layer["wo"].T

    def loss(params: Any, tokens: Any, targets: Any) -> Any:
        half = config.head_size // 2
        frequency = config.theta ** (-jnp.arange(half) / half)
        angle = jnp.outer(jnp.arange(config.seq), frequency)
        angle = jnp.concatenate([angle, angle], axis=-1)[:, None, :]
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        mask = jnp.tril(jnp.ones((config.seq, config.seq), bool))
        x = residual(params["embedding"][tokens])
        for layer in params["layers"]:
            x = residual(x + attention(norm(x, layer["attention_norm"]), layer, cos, sin, mask))
            y = norm(x, layer["ff_norm"])
            x = residual(x + (jax.nn.silu(y @ layer["w1"].T) * (y @ layer["w3"].T)) @ layer["w2"].T)
        scores = jax.nn.log_softmax(norm(x, params["norm"]) @ params["head"].T)
        return -jnp.take_along_axis(scores, targets[..., None], axis=-1).mean()

    def step(params: Any, tokens: Any, targets: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens, targets)
        return value, jax.tree.map(lambda p, g: p - w1.LEARNING_RATE * g, params, grads)

    weights, batch = jax.tree.map(sharding, mode.params), sharding(mode.batch)
    jitted = jax.jit(step, in_shardings=(weights, batch, batch), out_shardings=(None, weights), donate_argnums=0)

    params, (tokens, targets) = w1.init(config), w1.batch(config)
    args = jax.tree.map(lambda x: x.numpy(), (params, tokens, targets))
    clock, cpu = [time.perf_counter()], time.process_time()
    traced = jitted.trace(*args)
    clock.append(time.perf_counter())
    lowered = traced.lower()
    clock.append(time.perf_counter())
    compiled = lowered.compile()
    clock.append(time.perf_counter())
    cpu = time.process_time() - cpu
    placed, *placed_batch = jax.device_put(args, (weights, batch, batch))
    losses = []
    for _ in range(CHECKED_STEPS):
        value, placed = compiled(placed, *placed_batch)
        losses.append(float(value))
    eager = w1.Eager(params, config)
    expected = [float(eager.step(tokens, targets)) for _ in range(CHECKED_STEPS)]
    return {
        "trace": clock[1] - clock[0],
        "lower": clock[2] - clock[1],
        "compile": clock[3] - clock[2],
        "cpu": cpu,
        "losses": losses,
        "apart": apart("JAX", losses, expected),
        "wire_bytes": wire_bytes(compiled.as_text()),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="tp")
    parser.add_argument("--layers", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(measure(arguments.mode, w1.Config(layers=arguments.layers))))
