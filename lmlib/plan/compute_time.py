"""How long one device computes in a step, at best, scope by scope.

A matmul takes its FLOPs over what the device's matrix units reach, or its bytes over what its
memory reaches, whichever is longer (the roofline: Williams et al. 2009, "Roofline: an insightful
visual performance model"). Everything else takes its bytes, its *traffic*, which
lmlib.plan.traffic reads off the compiled program.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from lmlib.hardware.specifications import Accelerator
from lmlib.plan.flops import Matmul
from lmlib.plan.scopes import OTHER, PHASES
from lmlib.plan.traffic import Traffic

# What large bf16 matmuls reach of the peak. GPUs lower their clock under such load: in the steps of
# docs/gpus.md those of an H200 made 680 to 745 of 989 TFLOP/s. MXUs keep theirs.
MATMUL_EFFICIENCY = {"tpu": 0.9, "cuda": 0.70, "rocm": 0.55}
# Fused attention waits for its softmax besides, and reaches half of this in rows of so many tokens:
# measured on an H200 at 1,024 and 16,384, head_dim 128, of cuDNN's and of Triton's, which differ
# from it by up to a quarter (docs/gpus.md).
ATTENTION_EFFICIENCY = {"tpu": 0.5, "cuda": 0.57, "rocm": 0.4}
ATTENTION_FILL = {"tpu": 0, "cuda": 800, "rocm": 0}
# Streaming kernels reach this much of the memory's bandwidth.
MEMORY_EFFICIENCY = 0.85
# Matrix units work on blocks of this size; what doesn't fill one waits for it.
BLOCK = 128
# A matmul fills and drains its pipeline once for each block of its result: as long as contracting
# so many elements. On an H200 little of it was seen.
PIPELINE_FILL = {"tpu": 64, "cuda": 16, "rocm": 64}
# Rate of float32 operands against bf16: TPUs round them to bf16 by default, GPUs use TF32.
FLOAT32_RATE = {"tpu": 1.0, "cuda": 0.5, "rocm": 0.5}

# What runs one after the other: each hides only communication of its own.
LOOPS = ("layers, forward", "layers, backward", "outside the layers")


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

    @property
    def loop(self) -> str:
        return loop_of(self.phase, self.in_layers)


def loop_of(phase: str, in_layers: bool) -> str:
    """One of `LOOPS`; recomputation is in the backward one."""
    if not in_layers:
        return LOOPS[2]
    return LOOPS[0] if phase == "forward" else LOOPS[1]


def compute_time(
    matmuls: Iterable[Matmul],
    traffic: Iterable[Traffic],
    accelerator: Accelerator,
    scopes: Sequence[str],
) -> tuple[ScopeTime, ...]:
    """By scope, phase and loop, in the order of the model.

    Args:
      accelerator: its peak in bfloat16 and its memory's bandwidth are known.
      scopes: that are told apart, in their order.
    """
    sums: dict[tuple[str, str, bool], _Sums] = {}
    bandwidth = (accelerator.memory_bandwidth or math.inf) * MEMORY_EFFICIENCY
    for one in matmuls:
        own = sums.setdefault((one.scope, one.phase, one.in_layers), _Sums())
        by_flops = one.device_flops / _matmul_rate(one, accelerator)
        by_memory = one.device_bytes / bandwidth
        own.flops += one.device_flops
        own.bytes += one.device_bytes
        own.seconds += max(by_flops, by_memory)
        own.seconds_of_flops += by_flops if by_flops >= by_memory else 0.0
    for moved in traffic:
        own = sums.setdefault((moved.scope, moved.phase, moved.in_layers), _Sums())
        own.bytes += moved.bytes
        own.seconds += moved.bytes / bandwidth
    order = [(phase, scope) for phase in PHASES for scope in (*scopes, OTHER)]
    return tuple(
        ScopeTime(*key, own.flops, own.bytes, own.seconds, own.limit)
        for key, own in sorted(sums.items(), key=lambda item: order.index((item[0][1], item[0][0])))
    )


@dataclasses.dataclass
class _Sums:
    """Of one scope; `seconds_of_flops`: of matmuls that FLOPs limit, and not memory."""

    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0
    seconds_of_flops: float = 0.0

    @property
    def limit(self) -> str:
        return "FLOPs" if self.seconds_of_flops >= self.seconds / 2 else "memory"


def _matmul_rate(one: Matmul, accelerator: Accelerator) -> float:
    """FLOP/s that a device reaches in it."""
    platform = accelerator.platform
    peak = accelerator.flops.get(one.dtype)
    if peak is None:
        peak = accelerator.flops["bfloat16"]
        if one.dtype == "float32":
            peak *= FLOAT32_RATE[platform]
    if one.operation != "dot_general":
        _, _, keys, _ = one.sizes
        return peak * ATTENTION_EFFICIENCY[platform] * keys / (keys + ATTENTION_FILL[platform])
    _, M, N, K = one.sizes
    filled = math.prod(size / (math.ceil(size / BLOCK) * BLOCK) for size in (M, N))
    return peak * MATMUL_EFFICIENCY[platform] * filled * K / (K + PIPELINE_FILL[platform])
