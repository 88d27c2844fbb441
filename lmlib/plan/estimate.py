"""How long a step takes at best: an estimate, not a measurement.

It is the time that a device computes, and that of the collectives that no compute hides.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from jax.sharding import Mesh

from lmlib.hardware.specifications import Accelerator
from lmlib.plan.communication.collectives import Collective
from lmlib.plan.communication.time import (
    LINK_EFFICIENCY,
    LINK_LATENCY,
    NETWORK_EFFICIENCY,
    NETWORK_LATENCY,
    CollectiveTime,
    communication_time,
)
from lmlib.plan.compute_time import (
    ATTENTION_EFFICIENCY,
    ATTENTION_FILL,
    BLOCK,
    FLOAT32_RATE,
    LOOPS,
    MATMUL_EFFICIENCY,
    MEMORY_EFFICIENCY,
    PIPELINE_FILL,
    ScopeTime,
    compute_time,
)
from lmlib.plan.flops import FlopsPerToken
from lmlib.plan.traffic import Traffic
from lmlib.terminal.table import columns

_SHOWN = 1e-3  # of the compute: scopes that take less stand in one line


@dataclasses.dataclass(frozen=True)
class Estimate:
    """`mfu` counts attention whole, `mfu_causal` its causal half (0.4 for 40 %)."""

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
        rows = [("scope", "phase", "in", "TFLOP", "GB", "ms", "limited by")]
        shown = [one for one in self.scopes if one.seconds >= _SHOWN * self.compute_seconds]
        rest = self.compute_seconds - math.fsum(one.seconds for one in shown)
        rows += [
            (
                one.scope,
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
                one.route,
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
    flops: FlopsPerToken,
    traffic: Iterable[Traffic],
    collectives: Sequence[Collective],
    accelerator: Accelerator,
    mesh: Mesh,
) -> Estimate | None:
    """The time of a step; `None` for an accelerator whose rates are unknown.

    Args:
      flops, traffic, collectives: of the step.
    """
    peak = accelerator.flops.get("bfloat16")
    if peak is None or accelerator.memory_bandwidth is None:
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
    """`estimate` of a step whose compute is known, as from the estimate for another network."""
    compute = {loop: math.fsum(one.seconds for one in scopes if one.loop == loop) for loop in LOOPS}
    sent = communication_time(collectives, compute, mesh, accelerator)
    if sent is None:
        return None
    compute_seconds = math.fsum(compute.values())
    exposed = math.fsum(one.exposed_seconds for one in sent)
    seconds = compute_seconds + exposed
    tokens_per_second = flops.tokens / seconds
    all_peaks = accelerator.flops["bfloat16"] * mesh.devices.size
    return Estimate(
        scopes=scopes,
        collectives=sent,
        compute_seconds=compute_seconds,
        exposed_seconds=exposed,
        step_seconds=seconds,
        tokens_per_second=tokens_per_second,
        mfu=flops.analytic * tokens_per_second / all_peaks,
        mfu_causal=flops.analytic_causal * tokens_per_second / all_peaks,
        assumptions=_assumptions(accelerator),
    )


def _assumptions(accelerator: Accelerator) -> tuple[str, ...]:
    platform = accelerator.platform
    peak = accelerator.flops["bfloat16"] / 1e12
    fill = ATTENTION_FILL[platform]
    short_rows = f", times T / (T + {fill}) in rows of T tokens" if fill else ""
    return (
        f"bf16 peak of {peak:,.0f} TFLOP/s and {accelerator.memory_bandwidth or 0:,.3g} bytes/s of "
        "memory, by the vendor",
        f"large matmuls reach {MATMUL_EFFICIENCY[platform]:.0%} of the peak, times "
        f"K / (K + {PIPELINE_FILL[platform]}) for K contracted elements, less what does not fill "
        f"blocks of {BLOCK} rows or columns; float32 operands at {FLOAT32_RATE[platform]:.0%} of "
        "bf16's rate",
        f"attention kernels reach {ATTENTION_EFFICIENCY[platform]:.0%} of the peak{short_rows}",
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
