"""How long a step takes at best, part by part: an estimate, not a measurement.

Each matmul takes its FLOPs over what the device's matrix units reach, or its bytes over what its
memory reaches, whichever is longer (the roofline: Williams et al. 2009, "Roofline: an insightful
visual performance model"). Everything else takes its bytes. Collectives take what the links or the
network between their devices allow; those that overlap hide behind the compute of their own loop.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from jax.sharding import Mesh

from lmlib.hardware import Accelerator
from lmlib.plan.collectives import Collective
from lmlib.plan.flops import Matmul, StepFlops
from lmlib.plan.network import (
    LINK_EFFICIENCY,
    LINK_LATENCY,
    NETWORK_EFFICIENCY,
    NETWORK_LATENCY,
    route,
)
from lmlib.plan.scopes import OTHER, PARTS, PHASES
from lmlib.plan.traffic import Traffic
from lmlib.table import columns

# What large bf16 matmuls reach of the peak. GPUs lower their clock under such load: H100s reach
# 700 to 750 of 989 TFLOP/s in cuBLAS; MXUs keep theirs.
MATMUL_EFFICIENCY = {"tpu": 0.9, "cuda": 0.75, "rocm": 0.55}
# Fused attention waits for its softmax besides (Shah et al. 2024, arXiv:2407.08608, figure 5:
# 550 to 660 forward and 450 to 550 backward of 989 TFLOP/s at head_dim 128).
ATTENTION_EFFICIENCY = {"tpu": 0.5, "cuda": 0.55, "rocm": 0.4}
# Streaming kernels reach this much of the memory's bandwidth.
MEMORY_EFFICIENCY = 0.85
# Matrix units work on blocks of this size; what doesn't fill one waits for it.
BLOCK = 128
# A matmul fills and drains its pipeline once for each block of its result: as long as contracting
# so many elements.
PIPELINE_FILL = 64
# Rate of float32 operands against bf16: TPUs round them to bf16 by default, GPUs use TF32.
FLOAT32_RATE = {"tpu": 1.0, "cuda": 0.5, "rocm": 0.5}


@dataclasses.dataclass(frozen=True)
class PartTime:
    """A part of the step on one device, in one step; `limit` is "FLOPs" or "memory"."""

    part: str
    phase: str
    in_layers: bool
    flops: float
    bytes: float
    seconds: float
    limit: str


@dataclasses.dataclass(frozen=True)
class CollectiveTime:
    """Collectives of one kind, axes and place, in one step.

    `seconds` is on the wire; `exposed_seconds` is what nothing hides.
    """

    kind: str
    mesh_axes: tuple[str, ...]
    where: str
    network: str
    bytes_sent: int
    seconds: float
    exposed_seconds: float


@dataclasses.dataclass(frozen=True)
class Estimate:
    """`mfu` counts attention whole, `mfu_causal` its causal half (0.4 for 40 %)."""

    parts: tuple[PartTime, ...]
    collectives: tuple[CollectiveTime, ...]
    compute_seconds: float
    exposed_seconds: float
    step_seconds: float
    tokens_per_second: float
    mfu: float
    mfu_causal: float
    assumptions: tuple[str, ...]

    def __str__(self) -> str:
        rows = [("part", "phase", "in", "TFLOP", "GB", "ms", "limited by")]
        shown = [one for one in self.parts if one.seconds >= _SHOWN * self.compute_seconds]
        rest = self.compute_seconds - math.fsum(one.seconds for one in shown)
        rows += [
            (
                one.part,
                one.phase,
                "layers" if one.in_layers else "step",
                f"{one.flops / 1e12:,.3f}",
                f"{one.bytes / 1e9:,.3f}",
                f"{one.seconds * 1e3:,.2f}",
                one.limit,
            )
            for one in shown
        ]
        rows.append(("all the rest", "", "", "", "", f"{rest * 1e3:,.2f}", ""))
        sent = [("collective", "over", "where", "by", "GB sent", "ms", "ms not hidden")]
        sent += [
            (
                one.kind,
                " × ".join(one.mesh_axes),
                one.where,
                one.network,
                f"{one.bytes_sent / 1e9:,.3f}",
                f"{one.seconds * 1e3:,.2f}",
                f"{one.exposed_seconds * 1e3:,.2f}",
            )
            for one in self.collectives
        ]
        return "\n".join(
            [
                columns(rows),
                "",
                columns(sent) if self.collectives else "nothing is sent",
                "",
                f"expected step: {self.step_seconds * 1e3:,.1f} ms, compute "
                f"{self.compute_seconds * 1e3:,.1f} and communication that nothing hides "
                f"{self.exposed_seconds * 1e3:,.1f}",
                f"{self.tokens_per_second:,.0f} tokens/s; MFU {self.mfu:.1%} with attention "
                f"counted whole, {self.mfu_causal:.1%} with its causal half",
                "This is an estimate. It assumes:",
                *(f"- {assumption}" for assumption in self.assumptions),
            ]
        )


def estimate(
    flops: StepFlops,
    traffic: Sequence[Traffic],
    collectives: Sequence[Collective],
    accelerator: Accelerator,
    mesh: Mesh,
    tokens: int,
    flops_per_token: float,
    causal_flops_per_token: float,
) -> Estimate | None:
    """The time of a step; `None` for an accelerator whose rates are unknown.

    Args:
      flops, traffic, collectives: of the step, by the modules of those names.
      tokens: of a step, on all devices together.
      flops_per_token, causal_flops_per_token: what the model needs by the analytic count, with
        attention whole and with its causal half; for MFU.
    """
    peak = accelerator.flops.get("bfloat16")
    if peak is None or accelerator.memory_bandwidth is None:
        return None
    parts = _parts(flops.matmuls, traffic, accelerator)
    compute = {
        loop: math.fsum(one.seconds for one in parts if _loop(one.phase, one.in_layers) == loop)
        for loop in _LOOPS
    }
    sent = _sent(collectives, compute, mesh, accelerator)
    if sent is None:
        return None
    compute_seconds = math.fsum(compute.values())
    exposed = math.fsum(one.exposed_seconds for one in sent)
    seconds = compute_seconds + exposed
    devices = mesh.devices.size
    return Estimate(
        parts=parts,
        collectives=sent,
        compute_seconds=compute_seconds,
        exposed_seconds=exposed,
        step_seconds=seconds,
        tokens_per_second=tokens / seconds,
        mfu=flops_per_token * tokens / seconds / (devices * peak),
        mfu_causal=causal_flops_per_token * tokens / seconds / (devices * peak),
        assumptions=_assumptions(accelerator),
    )


_SHOWN = 1e-3  # of the compute: parts that take less stand in one line

# What runs one after the other, and can hide communication of its own only.
_LOOPS = ("layers, forward", "layers, backward", "outside the layers")


def _loop(phase: str, in_layers: bool) -> str:
    if not in_layers:
        return _LOOPS[2]
    return _LOOPS[0] if phase == "forward" else _LOOPS[1]


def _parts(
    matmuls: Iterable[Matmul], traffic: Iterable[Traffic], accelerator: Accelerator
) -> tuple[PartTime, ...]:
    """One line for each part, phase and loop, in the order of the model."""
    lines: dict[tuple[str, str, bool], _Line] = {}
    bandwidth = (accelerator.memory_bandwidth or math.inf) * MEMORY_EFFICIENCY
    for one in matmuls:
        line = lines.setdefault((one.part, one.phase, one.in_layers), _Line())
        by_flops = one.device_flops / _matmul_rate(one, accelerator)
        by_memory = one.device_bytes / bandwidth
        line.flops += one.device_flops
        line.bytes += one.device_bytes
        line.seconds += max(by_flops, by_memory)
        line.seconds_of_flops += by_flops if by_flops >= by_memory else 0.0
    for moved in traffic:
        line = lines.setdefault((moved.part, moved.phase, moved.in_layers), _Line())
        line.bytes += moved.bytes
        line.seconds += moved.bytes / bandwidth
    order = [(phase, part) for phase in PHASES for part in (*PARTS, OTHER)]
    return tuple(
        PartTime(
            part,
            phase,
            in_layers,
            line.flops,
            line.bytes,
            line.seconds,
            "FLOPs" if line.seconds_of_flops >= line.seconds / 2 else "memory",
        )
        for (part, phase, in_layers), line in sorted(
            lines.items(), key=lambda item: order.index((item[0][1], item[0][0]))
        )
    )


@dataclasses.dataclass
class _Line:
    """Sums for one line of the table; `seconds_of_flops` is the share that FLOPs decide."""

    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0
    seconds_of_flops: float = 0.0


def _matmul_rate(one: Matmul, accelerator: Accelerator) -> float:
    """FLOP/s that a device reaches in it."""
    platform = accelerator.platform
    peak = accelerator.flops.get(one.dtype)
    if peak is None:
        peak = accelerator.flops["bfloat16"]
        if one.dtype == "float32":
            peak *= FLOAT32_RATE[platform]
    if one.operation != "dot_general":
        return peak * ATTENTION_EFFICIENCY[platform]
    _, M, N, K = one.sizes
    filled = math.prod(size / (math.ceil(size / BLOCK) * BLOCK) for size in (M, N))
    return peak * MATMUL_EFFICIENCY[platform] * filled * K / (K + PIPELINE_FILL)


def _sent(
    collectives: Sequence[Collective],
    compute: dict[str, float],
    mesh: Mesh,
    accelerator: Accelerator,
) -> tuple[CollectiveTime, ...] | None:
    groups: dict[tuple[str, tuple[str, ...], str], list[Collective]] = {}
    for one in collectives:
        groups.setdefault((one.kind, one.mesh_axes, one.where), []).append(one)
    hidden = dict(compute)
    found = []
    for (kind, axes, where), group in groups.items():
        way = route(axes or mesh.axis_names, mesh, accelerator)
        if way is None:
            return None
        seconds = {
            overlaps: math.fsum(
                way.seconds(one.bytes_sent, kind) * one.count_per_step
                for one in group
                if one.overlaps is overlaps
            )
            for overlaps in (True, False)
        }
        loop = _loop(group[0].phase, group[0].in_layers)
        behind = min(seconds[True], hidden[loop])
        hidden[loop] -= behind
        found.append(
            CollectiveTime(
                kind,
                axes,
                where,
                way.name,
                sum(one.bytes_sent_per_step for one in group),
                seconds[True] + seconds[False],
                seconds[True] + seconds[False] - behind,
            )
        )
    return tuple(found)


def _assumptions(accelerator: Accelerator) -> tuple[str, ...]:
    platform = accelerator.platform
    peak = accelerator.flops["bfloat16"] / 1e12
    return (
        f"bf16 peak of {peak:,.0f} TFLOP/s and {accelerator.memory_bandwidth or 0:,.3g} bytes/s of "
        "memory, by the vendor",
        f"large matmuls reach {MATMUL_EFFICIENCY[platform]:.0%} of the peak, times "
        f"K / (K + {PIPELINE_FILL}) for K contracted elements, less what does not fill blocks of "
        f"{BLOCK} rows or columns; float32 operands at {FLOAT32_RATE[platform]:.0%} of bf16's rate",
        f"attention kernels reach {ATTENTION_EFFICIENCY[platform]:.0%} of the peak",
        f"memory reaches {MEMORY_EFFICIENCY:.0%} of its bandwidth; what is no matmul takes the "
        "bytes that its fusions read and write",
        f"links reach {LINK_EFFICIENCY:.0%} of {accelerator.link_bandwidth or 0:,.3g} bytes/s and "
        f"the network {NETWORK_EFFICIENCY:.0%} of {accelerator.network_bandwidth or 0:,.3g} bytes/s"
        f" each way; a hop takes {LINK_LATENCY * 1e6:.0f} µs, between hosts or slices "
        f"{NETWORK_LATENCY * 1e6:.0f} µs",
        "collectives that overlap hide fully behind the compute of their own loop, and slow it by "
        "nothing; kernels start without a gap; no device waits for another, for data or for the "
        "host",
    )
