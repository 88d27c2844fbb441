"""FLOPs, bytes and roofline times of the instructions of a compiled program.

The roofline bound is the longer of FLOPs over peak and bytes over bandwidth, at the vendor's rates
(Williams et al. 2009).
"""

import dataclasses
import math
import re
from collections.abc import Sequence

from lmlib.hardware.specifications import Accelerator
from lmlib.plan.program import Instruction, Program
from lmlib.plan.step_time import FLOAT32_RATE
from lmlib.plan.traffic import bytes_moved, multiplies, origin, scheduled, sends

# XLA's names of the dtypes that matrix units multiply faster than bfloat16.
_FASTER = {
    "f8e4m3fn": "float8_e4m3fn",
    "f8e4m3fnuz": "float8_e4m3fnuz",
    "f8e5m2": "float8_e5m2",
    "s8": "int8",
}


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
                x.name for called in one.called.values() for c in called for x in c.instructions
            ]
            flops, dtype = _products(one)
            found[one.name] = Work(
                one.name,
                _operation(one),
                *origin(one, place, scopes),
                sends=sends(one),
                calls=frozenset(inside if one.opcode != "fusion" else ()),
                flops=flops,
                bytes=bytes_moved(one),
                dtype=dtype,
            )
    return found


def _operation(one: Instruction) -> str:
    last = one.op_name.rpartition("/")[2]
    # Drop the closing brackets of transformations, as in "transpose(jvp(mlp/dot_general))".
    return (last if "(" in last else last.rstrip(")")) or one.opcode


def _products(one: Instruction) -> tuple[float | None, str]:
    """Returns the FLOPs of its matmuls, and the dtype of their first operands."""
    if one.opcode == "fusion":
        inner = [_products(each) for each in one.called["calls"][0].instructions]
        counted = [flops for flops, _ in inner if flops is not None]
        dtype = next((dtype for _, dtype in inner if dtype), "")
        return (math.fsum(counted) if len(counted) == len(inner) else None), dtype
    if not multiplies(one):
        return 0.0, ""
    # The text lacks contracted axes of other kernels. cuDNN's attention has the axes of several.
    pattern = r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]+)'
    found = re.search(pattern, one.attributes)
    if found is None or "__cudnn$fmha" in one.attributes:
        return None, ""
    left = one.operands[0].results[0]
    K = math.prod(left.shape[int(axis)] for axis in re.findall(r"\d+", found[1]))
    return 2.0 * math.prod(one.results[0].shape) * K, left.dtype
