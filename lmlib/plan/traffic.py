"""Counts the bytes that a compiled program moves through the memory of one device.

Each scheduled instruction reads its operands and writes its result once. A fusion is one
instruction. If it only slices an array, or only updates a slice, the slice counts. Arrays in a
TPU's on-chip memory are free, unless they were fetched there for one reader.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from lmlib.plan.program import FUSIONS, ArrayType, Instruction, Place, Program
from lmlib.plan.scopes import phase, scope
from lmlib.terminal.quantities import bytes_text

# These only rename or wait, or their called computation counts instead.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "while", "call"),
    *("call-start", "call-update", "conditional", "after-all", "partition-id", "replica-id"),
    *("optimization-barrier", "add-dependency", "slice-start"),
}
_FREE_CALLS = ("Bitcast", "Buffer", "PrepareAsyncCall")
_COLLECTIVE = ("all-", "reduce-scatter", "collective-", "ragged-", "async-", "send", "recv")
_MATMULS = {"dot", "convolution", "ragged-dot"}
_MULTIPLYING_CALLS = ("cublas", "cudnn", "matmul", "tpu_custom_call", "triton")
_FETCHED = {"copy-done", "slice-done"}  # ahead of time, for one reader
_SLICES = {"dynamic-slice", "slice", "gather"}
_SAME_ELEMENTS = {"bitcast", "convert"}  # a fusion computes only the elements that it needs


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that a scope reads and writes in a step, without matmuls and collectives.

    Args:
      scope, phase: names of lmlib.plan.scopes.
      in_layers: True inside the loop over layers.
    """

    scope: str
    phase: str
    in_layers: bool
    bytes: int


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The number of kernels that a device executes in a step, without collectives, and their bytes
    read and written. `product_bytes` counts matmuls and attention kernels."""

    number: int
    bytes: int
    product_bytes: int

    def __str__(self) -> str:
        others = bytes_text(self.bytes - self.product_bytes)
        return (
            f"{self.number:,} kernels read and write {bytes_text(self.bytes)}, "
            f"{others} of it outside matmuls and attention"
        )


def kernels(program: Program) -> Kernels:
    """Counts the kernels of one step; a kernel in a loop counts once per iteration."""
    found = list(_moving(program))
    return Kernels(
        number=sum(place.times for _, place, _ in found),
        bytes=sum(moved for *_, moved in found),
        product_bytes=sum(moved for one, _, moved in found if multiplies(one)),
    )


def traffic(program: Program, scopes: Sequence[str]) -> tuple[Traffic, ...]:
    """Returns the traffic by scope, phase and loop, in the order of the schedule."""
    totals: dict[tuple[str, str, bool], int] = {}
    for one, place, moved in _moving(program):
        if not multiplies(one):
            key = origin(one, place, scopes)
            totals[key] = totals.get(key, 0) + moved
    return tuple(Traffic(*key, total) for key, total in totals.items())


def _moving(program: Program) -> Iterator[tuple[Instruction, Place, int]]:
    """Yields the kernels of a step, without collectives, with the bytes of all executions."""
    for one, place in scheduled(program):
        if not sends(one) and (moved := bytes_moved(one)):
            yield one, place, moved * place.times


def scheduled(program: Program) -> Iterator[tuple[Instruction, Place]]:
    """Yields every instruction that a run executes, without the insides of fusions."""
    for one, place in program.instructions():
        if not any(caller.opcode in {*FUSIONS, "async-start"} for caller in place.callers):
            yield one, place


def origin(one: Instruction, place: Place, scopes: Sequence[str]) -> tuple[str, str, bool]:
    """Returns scope and phase of lmlib.plan.scopes, and True if it is in the loop over layers.

    An instruction without a name of its own belongs to the loop around it.
    """
    names = one.op_name or place.op_name
    around = "/".join(loop.op_name for loop in place.loops)
    return scope(names, scopes), phase(names), "layers" in f"{around}/{names}"


def multiplies(one: Instruction) -> bool:
    """True if it multiplies matrices, itself, in a fusion or in a library's kernel."""
    return any(
        each.opcode in _MATMULS
        or (each.opcode == "custom-call" and _calls(each, _MULTIPLYING_CALLS))
        for each in _computed(one)
    )


def sends(one: Instruction) -> bool:
    """True for a collective, the start or end of one, or a fusion with one."""
    return any(each.opcode.startswith(_COLLECTIVE) for each in _computed(one))


def bytes_moved(one: Instruction) -> int:
    """Returns the bytes that one execution reads and writes in the device's memory."""
    if one.opcode in _FREE or one.opcode.endswith("-done"):
        return 0
    if one.opcode == "custom-call" and _calls(one, _FREE_CALLS):
        return 0
    if one.opcode in FUSIONS:
        return _moved_by_fusion(one)
    if one.opcode == "copy-start":
        # Results: the copy, the source, and a flag. A fetched array counts with its reader.
        copy, copied, *_ = one.results
        return _stored([copy]) + (0 if copy.memory else _stored([copied]))
    if one.opcode in _SLICES:
        return 2 * _stored(one.results)
    if one.opcode == "dynamic-update-slice":
        return 2 * _stored(one.operands[1].results)
    return sum(map(_read, one.operands)) + _stored(one.results)


def _calls(one: Instruction, targets: tuple[str, ...]) -> bool:
    called = one.attribute("custom_call_target") or ""
    return any(target in called for target in targets)


def _computed(one: Instruction) -> Iterator[Instruction]:
    """Yields the instruction, and those inside it if it is a fusion."""
    yield one
    if one.opcode in FUSIONS:
        for inner in one.called["calls"][0].instructions:
            yield from _computed(inner)


def _moved_by_fusion(one: Instruction) -> int:
    fused = one.called["calls"][0]
    read = sum(
        _read_inside(each)
        for each in fused.instructions
        if each.opcode == "parameter" and _read(one.operands[int(each.arguments)])
    )
    results = fused.root.operands if fused.root.opcode == "tuple" else (fused.root,)
    return read + sum(map(_written, results))


def _read_inside(parameter: Instruction) -> int:
    """Returns the bytes that a fusion reads of one of its parameters."""
    # Readers of it, also through another shape or dtype; True if it is their first operand.
    readers: list[tuple[Instruction, bool]] = []
    same = [parameter]
    for each in parameter.computation.instructions:
        for position, operand in enumerate(each.operands):
            if operand in same:
                if each.opcode in _SAME_ELEMENTS:
                    same.append(each)
                else:
                    readers.append((each, position == 0))
    whole = sum(array.bytes for array in parameter.results)
    if readers and all(
        each.opcode in _SLICES or each.opcode == "dynamic-update-slice" for each, _ in readers
    ):
        sliced = (each.results for each, first in readers if each.opcode in _SLICES and first)
        return sum(map(_elements, sliced)) * whole // max(_elements(parameter.results), 1)
    return whole


def _elements(arrays: Iterable[ArrayType]) -> int:
    return sum(math.prod(array.shape) for array in arrays)


def _written(result: Instruction) -> int:
    while result.opcode == "bitcast":
        result = result.operands[0]
    updates = result.opcode == "dynamic-update-slice"
    return _stored((result.operands[1] if updates else result).results)


def _read(operand: Instruction) -> int:
    """Returns the bytes that a reader of the whole operand takes from memory."""
    if operand.opcode in _FETCHED:
        return sum(array.bytes for array in operand.results)
    return _stored(operand.results)


def _stored(arrays: Iterable[ArrayType]) -> int:
    """Returns the bytes of the arrays in the device's memory."""
    return sum(array.bytes for array in arrays if array.memory == 0)
