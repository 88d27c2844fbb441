"""Bytes that a compiled step moves between a device and its memory, besides those of its matmuls.

Each instruction of the schedule reads its operands and writes its result once; a fusion is one
instruction. Of an array that a fusion only slices, or only updates a slice of, the slice counts.
Instructions that hold a matmul, and collectives, are left out: lmlib.plan.flops and
lmlib.plan.collectives have them. What lies on a TPU's chip is free, unless it was fetched there
just for its reader.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from lmlib.plan.program import ArrayType, Computation, Instruction, Place, Program
from lmlib.plan.scopes import part, phase

# They rename, or wait, or are taken apart elsewhere.
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


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one part of a step moves on one device, in a step.

    Args:
      part, phase: as lmlib.plan.scopes names them.
      in_layers: whether inside the loop over layers.
      bytes: read and written.
    """

    part: str
    phase: str
    in_layers: bool
    bytes: int


def traffic(program: Program) -> tuple[Traffic, ...]:
    """By part and phase, in the order of the schedule."""
    totals: dict[tuple[str, str, bool], int] = {}
    for one, place in program.instructions():
        moved = 0 if _inside_fusion(place) else _moved(one, place.computation, program)
        if moved:
            names = one.op_name or (place.loops[-1].op_name if place.loops else "")
            around = "/".join(loop.op_name for loop in place.loops)
            key = (part(names), phase(names), "layers" in f"{around}/{names}")
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
    """Bytes of a fusion's parameter that it needs."""
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
    """Who reads it, and as which operand; through bitcasts."""
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
