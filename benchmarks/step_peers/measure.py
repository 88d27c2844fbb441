"""Measures steps in turns, so that a busy machine slows all alike, and compares their losses."""

import dataclasses
import importlib.util
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp

from lmlib.metrics.log import mfu
from lmlib.terminal.table import columns
from step_peers.work import Contender, Work

TURN = 5  # steps per turn; the first turn warms up and is not counted
STEPS = 30  # of each contender; their losses must agree

# Maximum relative difference of a loss from lmlib's; in these steps the loss falls by 1e-2 or more.
# float32 contenders differ in the order of their sums, by 6e-8 each, which training amplifies. A
# bfloat16 is off by up to 4e-3, and contenders round in different places; a loss averages over
# thousands of such errors.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-3}
OTHER_LOSSES = {"dense"}  # contenders with another model


@dataclasses.dataclass
class Measurement:
    """A contender's steps: the loss of each, and the seconds of each turn after the first."""

    losses: list[float] = dataclasses.field(default_factory=list)
    wall_seconds: list[float] = dataclasses.field(default_factory=list)
    cpu_seconds: list[float] = dataclasses.field(default_factory=list)
    planned_bytes: int | None = None
    peak_bytes: int | None = None


class MatrixProducts:
    """XLA's products of square matrices, whose speed bounds that of a step.

    The numbers are random, since a GPU multiplies equal numbers faster: it needs less power.
    """

    def __init__(self, precision: str):
        self._on_cpu = jax.default_backend() == "cpu"
        side, self._times = (2_048, 4) if self._on_cpu else (8_192, 20)
        self._factor = jax.random.normal(jax.random.key(0), (side, side), precision)
        self._product = jax.jit(jnp.matmul).lower(self._factor, self._factor).compile()
        self._flops = self._times * 2 * side**3

    def rate(self) -> float:
        """Returns FLOPs per second, or per CPU-second on a CPU."""
        clock = time.process_time if self._on_cpu else time.perf_counter
        began = clock()
        for _ in range(self._times):
            result = self._product(self._factor, self._factor)
        result.block_until_ready()
        return self._flops / (clock() - began)


@dataclasses.dataclass
class Measurements:
    """The steps of all contenders, and the rates of `MatrixProducts` between the turns."""

    work: Work
    of: dict[str, Measurement] = dataclasses.field(default_factory=dict)
    product_rates: list[float] = dataclasses.field(default_factory=list)

    def add(self, contenders: Mapping[str, Contender]) -> None:
        """Runs all steps of these contenders, `TURN` at a time. CPU seconds cover all threads."""
        measurements = {name: Measurement() for name in contenders}
        products = MatrixProducts(self.work.precision)
        for start in range(0, self.work.steps, TURN):
            self.product_rates += [products.rate()] * (start > 0)
            for name, contender in contenders.items():
                found = measurements[name]
                wall, cpu = time.perf_counter(), time.process_time()
                found.losses += contender.run(range(start, start + TURN))
                if start > 0:
                    found.cpu_seconds.append(time.process_time() - cpu)
                    found.wall_seconds.append(time.perf_counter() - wall)
        for name, contender in contenders.items():
            measurements[name].planned_bytes = contender.planned_bytes()
            measurements[name].peak_bytes = contender.peak_bytes()
        self.of |= measurements

    def problems(self) -> list[str]:
        """Returns a line for each contender whose losses differ from lmlib's."""
        found = []
        for name in self.of.keys() - OTHER_LOSSES:
            losses, expected = self.of[name].losses, self.of["lmlib"].losses
            problem = other_work(name, losses, expected, self.work.precision)
            found += [f"{self.work.size.name}: {problem}"] if problem else []
        return found

    def table(self, names: Sequence[str]) -> str:
        """Returns a table of the speed of each contender, and of lmlib relative to it."""
        size, device = self.work.size, jax.devices()[0]
        on_cpu = device.platform == "cpu"
        model = jax.eval_shape(size.make_model)
        flops_per_token = [model.flops_per_token(size.sequence, causal) for causal in (True, False)]
        speeds = {
            name: rates(size.tokens, found.cpu_seconds if on_cpu else found.wall_seconds)
            for name, found in self.of.items()
        }
        unit = "tokens per CPU-second" if on_cpu else "tokens per second"
        matmuls = statistics.median(self.product_rates)
        gpu_heads = ["MFU causal", "whole", "planned GB", "peak GB"]
        heads = ["tokens per second"] if on_cpu else gpu_heads
        heads += ["of matmul rate, causal", "whole"]
        first = ["", unit, "turns, thousands", "lmlib ÷ it", *heads]
        rows = [[*first, "last loss", "largest difference"]]
        for name in [name for name in names if name in self.of]:
            found, speed = self.of[name], statistics.median(speeds[name])
            turns = f"{min(speeds[name]) / 1e3:,.1f}–{max(speeds[name]) / 1e3:,.1f}"
            row = [name, f"{speed:,.0f}", turns]
            row.append(f"{statistics.median(speeds['lmlib']) / speed:.3f}")
            if on_cpu:
                row.append(f"{statistics.median(rates(size.tokens, found.wall_seconds)):,.0f}")
            else:
                shares = [mfu(flops, speed, [device]) for flops in flops_per_token]
                row += ["unknown" if share is None else f"{share:.1%}" for share in shares]
                sizes = found.planned_bytes, found.peak_bytes
                row += ["" if count is None else f"{count / 1e9:.2f}" for count in sizes]
            row += [f"{flops * speed / matmuls:.3f}" for flops in flops_per_token]
            row.append(f"{found.losses[-1]:.5f}")
            off = largest_difference(found.losses, self.of["lmlib"].losses)
            rows.append([*row, "other work" if name in OTHER_LOSSES else f"{off:.1e}"])
        return columns(rows)


def rates(tokens_per_step: int, seconds: Sequence[float]) -> list[float]:
    """Returns the tokens per second of each turn, from its `seconds`."""
    return [tokens_per_step * TURN / each for each in seconds]


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Returns the largest relative difference of a loss from its reference; NaN if one is NaN."""
    differences = [abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True)]
    return max(differences, key=lambda each: (each != each, each))


def other_work(
    name: str, losses: Sequence[float], reference: Sequence[float], precision: str
) -> str | None:
    """Describes the first step whose losses differ by more than `TOLERANCE`, or returns `None`."""
    for step, (loss, expected) in enumerate(zip(losses, reference, strict=True)):
        # Written so that NaN fails.
        if not abs(loss - expected) <= TOLERANCE[precision] * abs(expected):
            return (
                f"{name} does not do lmlib's work: in {precision}, its loss at step {step} is "
                f"{loss:.6f} and lmlib's {expected:.6f}, which differ by more than "
                f"{TOLERANCE[precision]:g} of it"
            )
    return None


def title(work: Work) -> str:
    size, settings = work.size, work.size.settings
    weights = jax.tree.leaves(jax.eval_shape(size.make_model))
    kept = "layers computed again in the backward pass" if size.recomputed else "activations kept"
    experts = ""
    if "experts" in settings:
        experts = f", each token through {settings['top']} of {settings['experts']} experts"
    return (
        f"{size.name}: {sum(weight.size for weight in weights) / 1e6:,.1f} M parameters (embed "
        f"{settings['embed']}, {settings['layers']} layers, {settings['heads']} heads, mlp "
        f"{settings['mlp']}, vocab {settings['vocab']}{experts}), {size.batch} × {size.sequence} "
        f"tokens a step, {work.precision}, {kept}{', documents packed' * work.packed}"
    )


def machine() -> str:
    """Returns this machine's cores, and the versions of the numerical libraries."""
    names = ("jax", "jaxlib", "torch", "transformers")
    found = [f"{name} {version(name)}" for name in names if importlib.util.find_spec(name)]
    information, cpu = Path("/proc/cpuinfo"), platform.processor() or platform.machine()
    for line in information.read_text().splitlines() if information.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            cpu = value.strip()
            break
    return f"{os.cpu_count()} × {cpu}, {', '.join(found)}"
