"""FLOPs, bytes and roofline times of the instructions of a compiled program.

The roofline bound is the longer of FLOPs over peak and bytes over bandwidth, at the vendor's rates
(Williams et al. 2009).
"""

import dataclasses
import math
import re
from collections.abc import Sequence

from lmlib.hardware.specifications import Accelerator
from lmlib.plan.program import Computation, Instruction, Program
from lmlib.plan.step_time import FLOAT32_RATE
from lmlib.plan.traffic import bytes_moved, multiplies, origin, scheduled, sends

# XLA's names of the dtypes that matrix units multiply faster than bfloat16.
_FASTER = {"f8e4m3fn": "float8_e4m3fn", "f8e4m3fnuz": "float8_e4m3fnuz", "s8": "int8"}


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one execution of an instruction on one device.

    `operation` is the JAX primitive that it ends with, or XLA's opcode. `calls` names the
    instructions that it calls and waits for, as a loop does. `flops` counts its matmuls; `None` if
    the text does not show them, as for library kernels and TPUs' convolutions. `dtype` is their
    operand dtype in XLA's spelling, or "".
    """

    name: str
    operation: str
    scope: str
    phase: str
    in_layers: bool
    sends: bool
    calls: frozenset[str]
    flops: float | None
    bytes: int
    dtype: str

    def seconds_at_best(self, accelerator: Accelerator) -> float | None:
        """Returns the roofline time; `None` if unknown, as for collectives and library kernels."""
        peak = accelerator.flops.get("bfloat16")
        if self.sends or self.flops is None or peak is None or not accelerator.memory_bandwidth:
            return None
        if self.dtype in _FASTER:
            peak = accelerator.flops.get(_FASTER[self.dtype], peak)
        elif self.dtype == "f32":
            peak *= FLOAT32_RATE[accelerator.platform]
        return max(self.flops / peak, self.bytes / accelerator.memory_bandwidth)


def works(program: Program, scopes: Sequence[str]) -> dict[str, Work]:
    """Returns the instructions that a run executes individually, by name."""
    found = {}
    for one, place in scheduled(program):
        if one.name not in found:
            inside = [
                inner.name
                for names in one.called.values()
                for name in names
                for inner in program.computations[name].instructions
            ]
            flops, dtype = _products(one, place.computation, program)
            found[one.name] = Work(
                one.name,
                _operation(one),
                *origin(one, place, scopes),
                sends=sends(one, program),
                calls=frozenset(inside if one.opcode != "fusion" else ()),
                flops=flops,
                bytes=bytes_moved(one, place.computation, program),
                dtype=dtype,
            )
    return found


def _operation(one: Instruction) -> str:
    last = one.op_name.rpartition("/")[2]
    # Drop the closing brackets of transformations, as in "transpose(jvp(mlp/dot_general))".
    return (last if "(" in last else last.rstrip(")")) or one.opcode


def _products(one: Instruction, around: Computation, program: Program) -> tuple[float | None, str]:
    """Returns the FLOPs of its matmuls, and the dtype of their first operands."""
    if one.opcode == "fusion":
        fused = program.computations[one.called["calls"][0]]
        inner = [_products(each, fused, program) for each in fused.instructions]
        counted = [flops for flops, _ in inner if flops is not None]
        dtype = next((dtype for _, dtype in inner if dtype), "")
        return (math.fsum(counted) if len(counted) == len(inner) else None), dtype
    if not multiplies(one, program):
        return 0.0, ""
    if "__cudnn$fmha" in one.attributes:  # its text has the axes of several matmuls
        return None, ""
    contracted = _contracted(one)
    if contracted is None:
        return None, ""
    left = around.by_name[one.operands[0]].results[0]
    K = math.prod(left.shape[axis] for axis in contracted)
    return 2.0 * math.prod(one.results[0].shape) * K, left.dtype


def _contracted(one: Instruction) -> list[int] | None:
    """Returns the contracted axes of a matmul's first operand; `None` if the text has none."""
    pattern = r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]+)'
    found = re.search(pattern, one.attributes)
    return None if found is None else [int(axis) for axis in re.findall(r"\d+", found.group(1))]
