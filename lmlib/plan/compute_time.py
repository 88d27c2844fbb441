"""How long one device computes in a step, at best, scope by scope.

A matmul takes its FLOPs over what the device's matrix units reach, or its bytes over what its
memory reaches, whichever is longer (the roofline: Williams et al. 2009, "Roofline: an insightful
visual performance model"). Everything else takes its bytes, its *traffic*, which is read off the
compiled program: each instruction of the schedule reads its operands and writes its result once. A
fusion is one instruction. If it only slices an array, or only updates a slice of it, the slice
counts. What lies on a TPU's chip is free, unless it was fetched there just for its reader.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from lmlib.hardware import Accelerator
from lmlib.plan.flops import Matmul
from lmlib.plan.program import ArrayType, Computation, Instruction, Place, Program
from lmlib.plan.scopes import OTHER, PHASES, SCOPES, phase, scope

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
# They only rename or wait, or what they call counts on its own.
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "iota",
    "while",
    "call",
    "conditional",
    "after-all",
    "partition-id",
    "replica-id",
    "optimization-barrier",
    "add-dependency",
    "slice-start",
}
_COLLECTIVE = ("all-", "reduce-scatter", "collective-", "ragged-", "async-", "send", "recv")
_MATMULS = {"dot", "convolution", "ragged-dot"}
# Custom calls that multiply matrices, or do nothing that takes time.
_OTHER_CALLS = ("cublas", "cudnn", "matmul", "tpu_custom_call", "triton", "Bitcast", "Buffer")
_FETCHED = {"copy-done", "slice-done"}  # ahead of time, for one reader
_SLICES = {"dynamic-slice", "slice", "gather"}

# What runs one after the other: each hides only communication of its own.
LOOPS = ("layers, forward", "layers, backward", "outside the layers")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that a scope reads from a device's memory and writes to it in a step, matmuls and
    collectives left out.

    Args:
      scope, phase: as lmlib.plan.scopes names them.
      in_layers: whether inside the loop over layers.
    """

    scope: str
    phase: str
    in_layers: bool
    bytes: int


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
    matmuls: Iterable[Matmul], traffic: Iterable[Traffic], accelerator: Accelerator
) -> tuple[ScopeTime, ...]:
    """By scope, phase and loop, in the order of the model.

    Args:
      accelerator: its peak in bfloat16 and its memory's bandwidth are known.
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
    order = [(phase, scope) for phase in PHASES for scope in (*SCOPES, OTHER)]
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
        return peak * ATTENTION_EFFICIENCY[platform]
    _, M, N, K = one.sizes
    filled = math.prod(size / (math.ceil(size / BLOCK) * BLOCK) for size in (M, N))
    return peak * MATMUL_EFFICIENCY[platform] * filled * K / (K + PIPELINE_FILL)


def traffic(program: Program) -> tuple[Traffic, ...]:
    """By scope, phase and loop, in the order of the schedule."""
    totals: dict[tuple[str, str, bool], int] = {}
    for one, place in program.instructions():
        moved = 0 if _inside_fusion(place) else _moved(one, place.computation, program)
        if moved:
            names = one.op_name or (place.loops[-1].op_name if place.loops else "")
            around = "/".join(loop.op_name for loop in place.loops)
            key = (scope(names), phase(names), "layers" in f"{around}/{names}")
            totals[key] = totals.get(key, 0) + moved * place.times
    return tuple(Traffic(*key, total) for key, total in totals.items())


def _inside_fusion(place: Place) -> bool:
    return place.caller is not None and place.caller[0].opcode in ("fusion", "async-start")


def _moved(one: Instruction, computation: Computation, program: Program) -> int:
    if one.opcode in _FREE or one.opcode.endswith("-done") or _is_left_out(one):
        return 0
    if one.opcode == "custom-call":
        target = one.attribute("custom_call_target") or ""
        if any(name in target for name in _OTHER_CALLS):
            return 0
    if one.opcode == "fusion":
        return _moved_by_fusion(one, computation, program)
    if one.opcode == "copy-start":
        # The copy, what is copied, and a flag. What it fetches counts with its reader.
        copy, copied, *_ = one.results
        return _stored([copy]) + (0 if copy.memory else _stored([copied]))
    if one.opcode in _SLICES:
        return 2 * _stored(one.results)
    if one.opcode == "dynamic-update-slice":
        return 2 * _stored(computation.by_name[one.operands[1]].results)
    read = sum(_read(computation.by_name[name]) for name in one.operands)
    return read + _stored(one.results)


def _moved_by_fusion(one: Instruction, computation: Computation, program: Program) -> int:
    fused = program.computations[one.called["calls"][0]]
    if any(map(_is_left_out, fused.instructions)):
        return 0
    read = 0
    for parameter in fused.instructions:
        if parameter.opcode == "parameter":
            operand = computation.by_name[one.operands[int(parameter.arguments)]]
            read += _read_of(parameter, fused) if _read(operand) else 0
    return read + sum(_written(result, fused) for result in _results(fused))


def _is_left_out(one: Instruction) -> bool:
    return one.opcode in _MATMULS or one.opcode.startswith(_COLLECTIVE)


def _read_of(parameter: Instruction, fused: Computation) -> int:
    """Bytes that a fusion reads of one of its parameters."""
    readers = list(_readers(parameter, fused))
    if readers and all(
        each.opcode in _SLICES or each.opcode == "dynamic-update-slice" for each, _ in readers
    ):
        return sum(
            sum(array.bytes for array in each.results)
            for each, position in readers
            if each.opcode in _SLICES and position == 0
        )
    return sum(array.bytes for array in parameter.results)


def _readers(parameter: Instruction, fused: Computation) -> Iterator[tuple[Instruction, int]]:
    """The instructions that read it, directly or through bitcasts, and as which operand."""
    names = {parameter.name}
    for each in fused.instructions:
        for position, operand in enumerate(each.operands):
            if operand in names:
                if each.opcode == "bitcast":
                    names.add(each.name)
                else:
                    yield each, position


def _results(fused: Computation) -> list[Instruction]:
    root = fused.root
    return [fused.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]


def _written(result: Instruction, fused: Computation) -> int:
    while result.opcode == "bitcast":
        result = fused.by_name[result.operands[0]]
    if result.opcode == "dynamic-update-slice":
        return _stored(fused.by_name[result.operands[1]].results)
    return _stored(result.results)


def _read(operand: Instruction) -> int:
    """Bytes that a reader of all of it takes from memory."""
    if operand.opcode in _FETCHED:
        return sum(array.bytes for array in operand.results)
    return _stored(operand.results)


def _stored(arrays: Sequence[ArrayType]) -> int:
    """Bytes of those that lie in the device's memory."""
    return sum(array.bytes for array in arrays if array.memory == 0)
