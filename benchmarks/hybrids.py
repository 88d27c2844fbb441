"""Speed of recurrent layers on one core (Linux), beside transformers' PyTorch layers and attention.

    python benchmarks/hybrids.py                                   # on a CPU, about 20 minutes
    python benchmarks/hybrids.py --parts=layers --lengths=1024 --peers=
    python benchmarks/hybrids.py --parts=planned                   # for an H200 that is not there

`layers`: tokens per CPU-second of one layer, forward and backward, in float32, for one row. All
layers have the same width. transformers runs its own code for CPUs, with as many parameters. All
take turns; the first compiles and is not counted, and values are medians.

`decoding`: tokens per CPU-second of one layer with the cache of a context, for one row.

`planned`: the step of experiments/llama_1b as it is, and with Gated DeltaNet in three of four
layers, compiled for `--topology`, and the time that lmlib.plan expects of it.
"""

import dataclasses
import functools
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags, logging

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # see benchmarks/train_step.py

import jax
import jax.numpy as jnp
import numpy as np
from step_peers.measure import machine
from step_peers.work import hybrid

from lmlib.compute import Compute
from lmlib.models.forward_context import ForwardContext
from lmlib.models.part import Part
from lmlib.models.parts.attention import Attention
from lmlib.models.recurrent.gated_deltanet import GatedDeltaNet
from lmlib.models.recurrent.mamba2 import Mamba2
from lmlib.terminal.table import columns
from runner.jax_settings.devices import choose_devices, keep_freed_memory

EMBED = {"small": 512, "tiny": 32}
PARTS = "layers", "decoding", "planned"
_PARTS = flags.DEFINE_list("parts", list(PARTS), f"Parts: {', '.join(PARTS)}.")
_SIZE = flags.DEFINE_enum("size", "small", EMBED, "Width of the layers; `tiny` is for tests.")
_LENGTHS = flags.DEFINE_list("lengths", ["1024", "4096", "16384"], "Tokens of a row.")
_CONTEXTS = flags.DEFINE_list("contexts", ["4096", "32768"], "Tokens before a decoded one.")
_PEERS = flags.DEFINE_list("peers", ["transformers"], "transformers, or nothing.")
_TURNS = flags.DEFINE_integer("turns", 3, "Turns of each, after the first.", lower_bound=1)
_CHUNK = flags.DEFINE_integer("chunk", 64, "Compute.recurrent_chunk.", lower_bound=1)
_TOPOLOGY = flags.DEFINE_string("topology", "h200:1x8", "Devices to plan for.")
_DECODED = 16  # tokens of a turn


def layers(embed: int) -> dict[str, Part]:
    key, head = jax.random.key(0), embed // 8
    half = dict(embed=embed, heads=16, key=key)
    return {
        "Gated DeltaNet": GatedDeltaNet(**half, kv_heads=8, key_dim=head, value_dim=head),
        "Mamba-2": Mamba2(**half, kv_heads=1, key_dim=2 * head, value_dim=head),
        "attention": Attention(embed, 8, 8, head, key=key),
    }


def peer(name: str, embed: int) -> Any:
    """transformers' layer of these sizes."""
    import transformers.models as models

    head, of_all = embed // 8, dict(hidden_size=embed, num_hidden_layers=1)
    if name == "Mamba-2":
        config = models.mamba2.Mamba2Config(
            **of_all, num_heads=16, head_dim=head, state_size=2 * head, n_groups=1, expand=2
        )
        return models.mamba2.modeling_mamba2.Mamba2Mixer(config, 0)
    config = models.qwen3_next.Qwen3NextConfig(
        **of_all, linear_num_value_heads=16, linear_num_key_heads=8, linear_key_head_dim=head,
        linear_value_head_dim=head,
    )  # fmt: skip
    return models.qwen3_next.modeling_qwen3_next.Qwen3NextGatedDeltaNet(config, 0)


def of_transformers(name: str, layer: Part, x_BSE: np.ndarray) -> Callable[[], Any]:
    """Its forward and backward pass; exits if its layer has other parameters than ours."""
    import torch

    module = peer(name, x_BSE.shape[-1])
    ours = sum(x.size for x in jax.tree.leaves(layer))
    if ours != (theirs := sum(x.numel() for x in module.parameters())):
        sys.exit(f"{name} has {ours:,} parameters, and transformers' layer {theirs:,}")
    x = torch.tensor(x_BSE, requires_grad=True)

    def run() -> None:
        module.zero_grad()
        module(x).square().mean().backward()

    return run


def of_lmlib(layer: Part, x_BSE: np.ndarray) -> Callable[[], Any]:
    """Its forward and backward pass."""
    positions_BS = jnp.arange(x_BSE.shape[1], dtype=jnp.int32)[None]
    context = ForwardContext(positions_BS, None, Compute("float32", recurrent_chunk=_CHUNK.value))

    def loss(layer: Part, x_BSE: jax.Array) -> jax.Array:
        return jnp.square(layer(x_BSE, context)[0]).mean()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))
    return lambda: jax.block_until_ready(gradients(layer, x_BSE))


def decoding(layer: Part, embed: int, length: int) -> Callable[[], Any]:
    """Decodes `_DECODED` tokens behind `length` others, whose values do not matter."""

    @functools.partial(jax.jit, donate_argnums=1)
    def one(layer: Part, cache: Any, x_B1E: jax.Array, at: jax.Array) -> tuple[jax.Array, Any]:
        positions_B1 = jnp.full((1, 1), at, jnp.int32)
        context = ForwardContext(
            positions_B1, positions_B1 * 0, Compute("float32"), lengths_B=positions_B1[0] + 1
        )
        return layer(x_B1E, context, cache)

    state = [jnp.ones((1, 1, embed)), layer.empty_cache(1, length + _DECODED, "float32")]

    def run() -> None:
        x_B1E, cache = state
        for n in range(_DECODED):
            x_B1E, cache = one(layer, cache, x_B1E, jnp.int32(length + n))
        state[1] = jax.block_until_ready(cache)

    return run


def rates(calls: dict[str, Callable[[], Any]], tokens: int) -> dict[str, float]:
    """Tokens per CPU-second of all threads, as medians over turns."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(_TURNS.value + 1):
        for name, call in calls.items():
            began = time.process_time()
            call()
            if turn:
                seconds[name].append(time.process_time() - began)
    return {name: tokens / statistics.median(each) for name, each in seconds.items()}


def measured_layers(embed: int, lengths: Sequence[int], peers: bool) -> str:
    rows = [["layer", *(f"{length:,}" for length in lengths)]]
    found: list[dict[str, float]] = []
    for length in lengths:
        x_BSE = np.random.default_rng(0).normal(size=(1, length, embed)).astype(np.float32)
        calls = {name: of_lmlib(layer, x_BSE) for name, layer in layers(embed).items()}
        if peers:
            for name, layer in [*layers(embed).items()][:2]:
                calls[f"{name}, transformers"] = of_transformers(name, layer, x_BSE)
        found.append(rates(calls, length))
    rows += [[name, *(f"{each[name]:,.0f}" for each in found)] for name in found[0]]
    for name in ("Gated DeltaNet", "Mamba-2"):
        others = [f"{name}, transformers"] if peers else []
        for other in [*others, "attention"]:
            ratios = (f"{each[name] / each[other]:.2f}" for each in found)
            rows.append([f"{name} ÷ {other.removeprefix(f'{name}, ')}", *ratios])
    return columns(rows)


def measured_decoding(embed: int, contexts: Sequence[int]) -> str:
    found = [
        rates({name: decoding(each, embed, n) for name, each in layers(embed).items()}, _DECODED)
        for n in contexts
    ]
    rows = [["layer", *(f"behind {n:,}" for n in contexts)]]
    rows += [[name, *(f"{each[name]:,.0f}" for each in found)] for name in found[0]]
    return columns(rows)


def planned(topology: str) -> str:
    """The plans of Llama 1B, and of the hybrid of its sizes."""
    from lmlib.plan import targets
    from lmlib.plan.planner import plan
    from runner.aot.abstract_inputs import built, without_data
    from runner.config.configs import load
    from runner.jax_settings.xla_flags import set_gpu_flags

    targets.prepare(target := targets.parse(topology))
    set_gpu_flags()
    llama = built(without_data(load("experiments/llama_1b")), target.devices())
    model = functools.partial(hybrid, **llama.model.keywords)
    rows = [["", "parameters", "kernels", "GB moved", "step, ms", "MFU", "memory, GB"]]
    of_both = ("Llama 1B", llama), ("hybrid 3:1", dataclasses.replace(llama, model=model))
    for name, experiment in of_both:
        report = plan(experiment, target)
        assert report.kernels is not None and report.estimate is not None, "it does not fit"
        rows.append(
            [
                name, f"{report.parameters / 1e6:,.0f} M", f"{report.kernels.number:,}",
                f"{report.kernels.bytes / 1e9:,.0f}",
                f"{report.estimate.step_seconds * 1e3:,.1f}", f"{report.estimate.mfu:.1%}",
                f"{report.memory.needed / 1e9:,.1f}",
            ]
        )  # fmt: skip
    return columns(rows)


def main(arguments: Sequence[str]) -> None:
    if arguments[1:]:
        sys.exit(f"unknown argument {arguments[1]!r}; options begin with --, see --help")
    if unknown := {*_PARTS.value} - {*PARTS}:
        sys.exit(f"--parts={unknown.pop()} is not known; choose from {', '.join(PARTS)}")
    logging.set_verbosity(logging.WARNING)
    keep_freed_memory()
    if {"layers", "decoding"} & {*_PARTS.value}:
        # One core: threads of either library that wait in a loop for others would count as work.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    choose_devices()
    peers = any(_PEERS.value)
    if peers and None in map(importlib.util.find_spec, ("torch", "transformers")):
        print("transformers: not installed, or PyTorch (pip install 'lmlib[parity]')")
        peers = False
    embed = EMBED[_SIZE.value]
    print(machine(), flush=True)
    if "layers" in _PARTS.value:
        print(f"\none layer of width {embed}, forward and backward: tokens per CPU-second")
        print(measured_layers(embed, [*map(int, _LENGTHS.value)], peers), flush=True)
    if "decoding" in _PARTS.value:
        print(f"\none layer of width {embed}, one token at a time: tokens per CPU-second")
        print(measured_decoding(embed, [*map(int, _CONTEXTS.value)]), flush=True)
    if "planned" in _PARTS.value:
        print(f"\none step of 64 × 1,024 tokens, planned for {_TOPOLOGY.value}")
        print(planned(_TOPOLOGY.value), flush=True)


if __name__ == "__main__":
    app.run(main)
