"""Estimates how long a step takes at best: compute, and communication that no compute hides.

Compute follows the roofline (Williams et al. 2009, "Roofline: an insightful visual performance
model"). A matmul takes its FLOPs over the rate that matrix units reach, or its bytes over the
memory bandwidth, whichever is longer. Everything else takes its bytes, the *traffic* that
lmlib.plan.traffic reads off the compiled program.

A collective takes the time that the links or the network between its devices allow. Over several
slices or hosts it is hierarchical: links join the n devices of each slice or host, and between
slices or hosts each device sends 1/n of the bytes.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from lmlib.hardware.specifications import Accelerator
from lmlib.plan.collectives import Collective, grouped
from lmlib.plan.flops import FlopsPerToken, Matmul, StepFlops
from lmlib.plan.scopes import OTHER, PHASES
from lmlib.plan.traffic import Traffic
from lmlib.terminal.quantities import flops_unit
from lmlib.terminal.table import columns

# Fraction of the peak that large bf16 matmuls reach. GPUs lower their clock under such load: in the
# steps of docs/gpus.md an H200 made 680 to 745 of 989 TFLOP/s. MXUs keep their clock.
MATMUL_EFFICIENCY = {"tpu": 0.9, "cuda": 0.70, "rocm": 0.55}
# Rate of lmlib's grouped products, as a share of the rate of matmuls. It was not measured.
GROUPED_SHARE = 0.85
# Fused attention also waits for its softmax. In rows of ATTENTION_FILL tokens it reaches half of
# ATTENTION_EFFICIENCY. Measured on an H200 at 1,024 and 16,384 tokens, head_dim 128, with cuDNN's
# and Triton's kernels, which differ from this by up to a quarter (docs/gpus.md).
ATTENTION_EFFICIENCY = {"tpu": 0.5, "cuda": 0.57, "rocm": 0.4}
ATTENTION_FILL = {"tpu": 0, "cuda": 800, "rocm": 0}
# Fraction of the memory bandwidth that streaming kernels reach.
MEMORY_EFFICIENCY = 0.85
# Matrix units work on blocks of this size. A partly filled block takes the time of a full one.
BLOCK = 128
# A matmul fills and drains its pipeline once per block of its result, which takes as long as
# contracting this many elements. An H200 showed little of it.
PIPELINE_FILL = {"tpu": 64, "cuda": 16, "rocm": 64}
# Rate of float32 operands against bf16: TPUs round them to bf16 by default, GPUs use TF32.
FLOAT32_RATE = {"tpu": 1.0, "cuda": 0.5, "rocm": 0.5}
# Seconds for one message from a device to the next: TPUs' over a link, GPUs' over NVLink, and
# between hosts.
LINK_LATENCY = 1e-6
NETWORK_LATENCY = 5e-6
# Fraction of the specified bandwidth that long messages reach. Protocol and waiting for the slowest
# device take the rest.
LINK_EFFICIENCY = 0.8
NETWORK_EFFICIENCY = 0.8
_SHOWN = 1e-3  # of the compute: scopes that take less stand in one line


@dataclasses.dataclass(frozen=True)
class ScopeTime:
    """A scope's work on one device in one step; `limit` is "FLOPs" or "memory"."""

    scope: str
    phase: str
    in_layers: bool
    flops: float
    bytes: float
    seconds: float
    limit: str


def compute_time(
    matmuls: Iterable[Matmul],
    traffic: Iterable[Traffic],
    accelerator: Accelerator,
    scopes: Sequence[str],
) -> tuple[ScopeTime, ...]:
    """Returns the compute time by scope, phase and loop, in the order of the model.

    The accelerator's bfloat16 peak and memory bandwidth must be known.
    """
    works = collections.defaultdict(list)
    bandwidth = (accelerator.memory_bandwidth or math.inf) * MEMORY_EFFICIENCY
    for one in matmuls:
        by_flops = one.device_flops / _matmul_rate(one, accelerator)
        by_memory = one.device_bytes / bandwidth
        limited_by_flops = by_flops if by_flops >= by_memory else 0.0
        work = (one.device_flops, one.device_bytes, max(by_flops, by_memory), limited_by_flops)
        works[one.scope, one.phase, one.in_layers].append(work)
    for moved in traffic:
        work = (0.0, moved.bytes, moved.bytes / bandwidth, 0.0)
        works[moved.scope, moved.phase, moved.in_layers].append(work)
    order = [(scope, phase) for phase in PHASES for scope in (*scopes, OTHER)]
    found = []
    for key in sorted(works, key=lambda key: order.index(key[:2])):
        flops, size, seconds, limited_by_flops = map(math.fsum, zip(*works[key], strict=True))
        limit = "FLOPs" if limited_by_flops >= seconds / 2 else "memory"
        found.append(ScopeTime(*key, flops, size, seconds, limit))
    return tuple(found)


def _matmul_rate(one: Matmul, accelerator: Accelerator) -> float:
    """FLOP/s that a device reaches in it."""
    platform = accelerator.platform
    slower = FLOAT32_RATE[platform] if one.dtype == "float32" else 1.0
    peak = accelerator.flops.get(one.dtype, accelerator.flops["bfloat16"] * slower)
    grouped = one.operation == "grouped_product"
    if one.operation != "dot_general" and not grouped:
        _, _, keys, _ = one.sizes
        return peak * ATTENTION_EFFICIENCY[platform] * keys / (keys + ATTENTION_FILL[platform])
    _, M, N, K = one.sizes
    filled = math.prod(size / (math.ceil(size / BLOCK) * BLOCK) for size in (M, N))
    efficiency = MATMUL_EFFICIENCY[platform] * (GROUPED_SHARE if grouped else 1.0)
    return peak * efficiency * filled * K / (K + PIPELINE_FILL[platform])


@dataclasses.dataclass(frozen=True)
class CollectiveTime:
    """The collectives of one kind, mesh axes and place in one step.

    `seconds` is their whole time, and `exposed_seconds` the part that no compute hides.
    """

    kind: str
    mesh_axes: tuple[str, ...]
    where: str
    route: str
    bytes_sent: int
    seconds: float
    exposed_seconds: float


@dataclasses.dataclass(frozen=True)
class Route:
    """The network between the devices of one group.

    `inside` counts its devices in one slice or host, joined by links, and `outside` the slices or
    hosts. Bandwidths are bytes/s of a device; `latency` is in seconds to the farthest device.
    `mean_hops` is the mean number of links between two devices of a slice or host.
    """

    inside: int
    outside: int
    link_bandwidth: float
    network_bandwidth: float
    latency: float
    mean_hops: float

    @property
    def name(self) -> str:
        if self.outside == 1:
            return "links"
        return "network" if self.inside == 1 else "links and network"

    def seconds(self, bytes_sent: int, kind: str) -> float:
        """For a collective over which each device of one flat ring would send `bytes_sent`.

        Links and network work at the same time on different pieces of an array, so the slower one
        decides.
        """
        n = self.inside * self.outside
        if n == 1:
            return 0.0
        whole = bytes_sent * n / (n - 1)  # all but the ring's factor (n - 1) / n
        on_links = whole * (self.inside - 1) / self.inside
        on_network = whole * (self.outside - 1) / self.outside
        if kind.endswith("all-to-all"):
            # Each device's message to each other goes all the way; nothing is shared.
            on_links *= self.mean_hops / self.outside
        else:
            on_network /= self.inside
        travelling = max(on_links / self.link_bandwidth, on_network / self.network_bandwidth)
        return travelling + (2 if kind == "all-reduce" else 1) * self.latency


def route(axes: Sequence[str], mesh: Mesh, accelerator: Accelerator) -> Route | None:
    """Returns the route between devices that differ along `axes`.

    Returns `None` if the speed of the accelerator's links or of a needed network is unknown.
    """
    islands: dict[int, list[Any]] = {}  # slices or hosts, whose devices are joined by links
    for device in _group(axes, mesh):
        is_tpu = accelerator.platform == "tpu"
        island = getattr(device, "slice_index", 0) if is_tpu else device.process_index
        islands.setdefault(island, []).append(device)
    links, hops, mean_hops = _links(next(iter(islands.values())), mesh.devices.flat, accelerator)
    if accelerator.link_bandwidth is None:
        return None
    if accelerator.network_bandwidth is None and len(islands) > 1:
        return None
    return Route(
        inside=max(map(len, islands.values())),
        outside=len(islands),
        link_bandwidth=accelerator.link_bandwidth * links * LINK_EFFICIENCY,
        network_bandwidth=(accelerator.network_bandwidth or math.inf) * NETWORK_EFFICIENCY,
        latency=hops * LINK_LATENCY + (len(islands) - 1) * NETWORK_LATENCY,
        mean_hops=mean_hops,
    )


def dimensions_of_torus(axes: Sequence[str], mesh: Mesh) -> int:
    """Returns how many dimensions of a TPU slice a group along `axes` spans; 0 for other
    devices."""
    group = _group(axes, mesh)
    if group[0].platform != "tpu":
        return 0
    return sum(len(set(places)) > 1 for places in zip(*(one.coords for one in group), strict=True))


def _group(axes: Sequence[str], mesh: Mesh) -> list[Any]:
    """Returns the first group of devices that differ only along `axes`."""
    others = [index for index, name in enumerate(mesh.axis_names) if name not in axes]
    own = [mesh.axis_names.index(name) for name in axes]
    size = math.prod(mesh.shape[name] for name in axes)
    return mesh.devices.transpose(*others, *own).reshape(-1, size)[0].tolist()


def _links(group: Sequence[Any], everyone: Any, accelerator: Accelerator) -> tuple[int, int, float]:
    """Returns the links a device sends over at once, the hops to the farthest of `group`, and the
    mean hops.

    On a torus a device sends both ways along each dimension that closes to a ring, and one way
    along the others. A GPU's links all lead to one switch, and a ring of GPUs uses it.
    """
    if accelerator.torus_dimensions == 0:
        return 1, len(group) - 1, 1.0
    coordinates = np.array([device.coords for device in group])
    every = np.array([device.coords for device in everyone])
    links = hops = 0
    mean_hops = 0.0
    for dimension in range(coordinates.shape[1]):
        size = len(set(coordinates[:, dimension].tolist()))
        full = int(every[:, dimension].max()) + 1
        is_ring = size == full and closes(full, accelerator.torus_dimensions)
        links += 0 if size == 1 else 2 if is_ring else 1
        hops += size // 2 if is_ring else size - 1
        mean_hops += size / 4 if is_ring else (size - 1 / size) / 3
    return max(links, 1), hops, max(mean_hops, 1.0)


def closes(size: int, torus_dimensions: int) -> bool:
    """True if a dimension of a slice is a ring: 16 chips, a whole pod, in a 2D torus, and multiples
    of 4 in a 3D torus (jax-ml.github.io/scaling-book/tpus)."""
    return size == 16 if torus_dimensions == 2 else size % 4 == 0


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The expected time of a step. MFU is a fraction (0.4 for 40 %); `mfu` counts full attention,
    `mfu_causal` its causal half."""

    scopes: tuple[ScopeTime, ...]
    collectives: tuple[CollectiveTime, ...]
    compute_seconds: float
    exposed_seconds: float
    step_seconds: float
    tokens_per_second: float
    mfu: float
    mfu_causal: float
    assumptions: tuple[str, ...]

    def __str__(self) -> str:
        unit, flops = flops_unit(max((one.flops for one in self.scopes), default=0.0))
        rows = [("scope", "phase", "in", unit, "GB", "ms", "limited by")]
        rest = self.compute_seconds
        for one in self.scopes:
            if one.seconds >= _SHOWN * self.compute_seconds:
                rest -= one.seconds
                work = f"{one.flops / flops:,.3f}", f"{one.bytes / 1e9:,.3f}", _ms(one.seconds)
                where = "layers" if one.in_layers else "step"
                rows.append((one.scope, one.phase, where, *work, one.limit))
        rows.append(("all others", "", "", "", "", _ms(abs(rest)), ""))
        sent = [("collective", "over", "where", "by", "GB sent", "ms", "ms exposed")]
        for each in self.collectives:
            size, axes = f"{each.bytes_sent / 1e9:,.3f}", " × ".join(each.mesh_axes)
            times = _ms(each.seconds), _ms(each.exposed_seconds)
            sent.append((each.kind, axes, each.where, each.route, size, *times))
        return f"""{columns(rows)}

{columns(sent) if self.collectives else "no communication"}

expected step: {self.step_seconds * 1e3:,.1f} ms, compute {self.compute_seconds * 1e3:,.1f} ms and \
exposed communication {self.exposed_seconds * 1e3:,.1f} ms
{self.tokens_per_second:,.0f} tokens/s; MFU {self.mfu:.1%} with full attention, \
{self.mfu_causal:.1%} with causal attention
This is an estimate. It assumes:
""" + "\n".join(f"- {assumption}" for assumption in self.assumptions)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


def estimate(
    flops: FlopsPerToken,
    traffic: Iterable[Traffic],
    collectives: Sequence[Collective],
    accelerator: Accelerator,
    mesh: Mesh,
) -> Estimate | None:
    """Estimates the time of a step from its FLOPs, memory traffic and collectives.

    Returns `None` if the accelerator's rates are unknown.
    """
    if "bfloat16" not in accelerator.flops or accelerator.memory_bandwidth is None:
        return None
    scopes = compute_time(flops.counted.matmuls, traffic, accelerator, flops.counted.scopes)
    return with_communication(scopes, flops, collectives, accelerator, mesh)


def with_communication(
    scopes: tuple[ScopeTime, ...],
    flops: FlopsPerToken,
    collectives: Sequence[Collective],
    accelerator: Accelerator,
    mesh: Mesh,
) -> Estimate | None:
    """Estimates a step whose compute times are known, for example from another network's plan.

    Overlapping collectives hide behind the compute of their own loop.
    """
    unused: dict[Any, float] = {}  # seconds of compute by loop, which hide no collective yet
    for loop in dict.fromkeys(map(_loop, scopes)):
        unused[loop] = math.fsum(one.seconds for one in scopes if _loop(one) == loop)
    compute_seconds = math.fsum(unused.values())
    sent = []
    for (kind, axes, where), group in grouped(collectives):
        way = route(axes or mesh.axis_names, mesh, accelerator)
        if way is None:
            return None
        seconds = {True: 0.0, False: 0.0}  # with overlap, and without
        for overlaps in seconds:
            seconds[overlaps] = math.fsum(
                way.seconds(one.bytes_sent, kind) * one.count_per_step
                for one in group
                if one.overlaps is overlaps
            )
        loop, total = _loop(group[0]), seconds[True] + seconds[False]
        hidden = min(seconds[True], unused.get(loop, 0.0))
        unused[loop] = unused.get(loop, 0.0) - hidden
        size = sum(one.bytes_sent_per_step for one in group)
        sent.append(CollectiveTime(kind, axes, where, way.name, size, total, total - hidden))
    exposed = math.fsum(one.exposed_seconds for one in sent)
    step_seconds = compute_seconds + exposed
    tokens_per_second = flops.tokens / step_seconds
    all_peaks = accelerator.flops["bfloat16"] * mesh.devices.size
    return Estimate(
        scopes=scopes,
        collectives=tuple(sent),
        compute_seconds=compute_seconds,
        exposed_seconds=exposed,
        step_seconds=step_seconds,
        tokens_per_second=tokens_per_second,
        mfu=flops.analytic * tokens_per_second / all_peaks,
        mfu_causal=flops.analytic_causal * tokens_per_second / all_peaks,
        assumptions=(*_assumptions(accelerator), *_on_experts(flops.counted)),
    )


def _on_experts(counted: StepFlops) -> Iterator[str]:
    if any(one.scope == "experts" for one in counted.matmuls):
        imbalance, rounds = counted.routing.imbalance, counted.routing.further_rounds + 1
        yield (
            f"the busiest device along `expert` gets {imbalance:g} times the rows of even routing, "
            f"in {rounds} round{'s' * (rounds > 1)}, and its time is the step's"
        )


def _loop(one: ScopeTime | Collective) -> tuple[bool, bool]:
    """Identifies the layers' forward or backward loop, or everything outside the layers.

    These run one after the other, so each hides only its own communication. Recomputation is in
    the backward loop.
    """
    return one.in_layers, one.in_layers and one.phase == "forward"


def _assumptions(accelerator: Accelerator) -> tuple[str, ...]:
    platform = accelerator.platform
    peak = accelerator.flops["bfloat16"] / 1e12
    fill = ATTENTION_FILL[platform]
    short_rows = f", times T / (T + {fill}) in rows of T tokens" if fill else ""
    return (
        f"bf16 peak of {peak:,.0f} TFLOP/s and {accelerator.memory_bandwidth or 0:,.3g} bytes/s of "
        "memory, by the vendor",
        f"large matmuls reach {MATMUL_EFFICIENCY[platform]:.0%} of the peak, times "
        f"K / (K + {PIPELINE_FILL[platform]}) for K contracted elements, less the part that does "
        f"not fill blocks of {BLOCK} rows or columns; float32 operands reach "
        f"{FLOAT32_RATE[platform]:.0%} of bf16's rate",
        f"attention kernels reach {ATTENTION_EFFICIENCY[platform]:.0%} of the peak{short_rows}",
        f"Triton's grouped products of experts reach {GROUPED_SHARE:.0%} of the rate of matmuls "
        "(not measured)",
        f"memory reaches {MEMORY_EFFICIENCY:.0%} of its bandwidth; operations other than matmuls "
        "take as long as their reads and writes",
        f"links reach {LINK_EFFICIENCY:.0%} of {accelerator.link_bandwidth or 0:,.3g} bytes/s and "
        f"the network {NETWORK_EFFICIENCY:.0%} of {accelerator.network_bandwidth or 0:,.3g} bytes/s"
        f" each way; a hop takes {LINK_LATENCY * 1e6:.0f} µs, between hosts or slices "
        f"{NETWORK_LATENCY * 1e6:.0f} µs",
        "collectives that overlap hide fully behind the compute of their own loop, and slow it by "
        "nothing; kernels start without a gap; no device waits for another, for data or for the "
        "host",
    )
