"""The largest arrays that a compiled program makes."""

import dataclasses

from lmlib.plan.parts import Part, largest
from lmlib.plan.program import HOST_MEMORY, Program

# They hand on what others have made, or stand for the program's arguments.
_MAKES_NOTHING = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
    "optimization-barrier",
}


@dataclasses.dataclass(frozen=True)
class LargeArray(Part):
    """On one device."""

    shape: tuple[int, ...] = ()


def largest_arrays(program: Program, count: int = 3) -> tuple[LargeArray, ...]:
    """The largest ones on one device, by type and JAX operation; equal ones count once.

    They need not all be there at the same time. Padding, which TPUs add, is not counted.
    """
    found: dict[str, LargeArray] = {}
    for instruction, place in program.instructions():
        fused = place.caller is not None and place.caller[0].opcode == "fusion"
        if fused or instruction.opcode in _MAKES_NOTHING:
            continue
        for array in instruction.results:
            if array.memory == HOST_MEMORY:
                continue
            shape = ",".join(map(str, array.shape))
            name = f"{array.dtype}[{shape}] {_operation(instruction.op_name)}".rstrip()
            found[name] = LargeArray(name, array.bytes, shape=array.shape)
    return largest(found.values(), count)


def _operation(op_name: str) -> str:
    """The last two parts of the path that JAX gives an operation."""
    return "/".join(op_name.split("/")[-2:])
