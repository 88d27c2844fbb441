"""Lists the collectives of a compiled step: how often each runs, what it sends, and over which
axes.

Bytes sent count one device in the ring algorithm over n devices. An all-gather, a reduce-scatter
and an all-to-all send (n-1)/n of the whole array. An all-reduce sends twice that, because it is a
reduce-scatter and an all-gather (Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms
for clusters of workstations"). A collective-permute sends the array.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from lmlib.plan.program import ArrayType, Instruction, Place, Program
from lmlib.plan.scopes import phase, turn
from lmlib.terminal.quantities import bytes_text
from lmlib.terminal.table import columns

# Ratio of bytes sent to bytes of the whole array, times n / (n - 1).
_RING = {
    **{"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 1},
    **{"ragged-all-to-all": 1, "collective-broadcast": 1},
}
KINDS = (*_RING, "collective-permute")
# Compute that can hide a collective. Other opcodes only rename or move memory.
_COMPUTES = {"fusion", "dot", "convolution", "while", "call", "conditional", "custom-call", "sort"}
# Custom calls of TPU programs that compute nothing.
_BOOKKEEPING = {
    *("ConcatBitcast", "AllocateBuffer", "AssumeGatherIndicesInBound"),
    *("PrepareAsyncCallStart", "PrepareAsyncCallDone"),
}
_WRAPPERS = {"fusion", "async-start", "call-start"}  # their computation runs in their place
# Attribute of a `send` with the kind of its collective. The `recv` of the same rendezvous ends it.
_BETWEEN_SLICES = "_xla_megascale_transfer_type"
_RENDEZVOUS = "_xla_host_transfer_rendezvous"
_SEARCHED = 30  # instructions searched for the source of one whose metadata XLA dropped


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program.

    `arrays` are whole: results of an all-gather, operands of other kinds; several if XLA combined
    small collectives. `bytes` is their size, `bytes_sent` the bytes that one device sends.
    `each` is "step", or one iteration of the innermost loop: "layer", "microbatch". `mesh_axes` is
    empty if no axes give its device groups. `overlaps` is True if compute is scheduled between its
    start and end.
    """

    name: str
    kind: str
    mesh_axes: tuple[str, ...]
    group_size: int
    arrays: tuple[ArrayType, ...]
    bytes: int
    bytes_sent: int
    count_per_step: int
    each: str
    phase: str
    overlaps: bool
    assembles: bool  # an all-reduce that gathers: each device adds its shard to zeros
    op_name: str

    @property
    def where(self) -> str:
        return f"each {self.each}, {self.phase}"

    @property
    def in_layers(self) -> bool:
        """True if it belongs to a layer, in a loop or unrolled."""
        return self.each == "layer" or "layers" in self.op_name

    @property
    def bytes_sent_per_step(self) -> int:
        return self.bytes_sent * self.count_per_step


class Collectives(tuple[Collective, ...]):
    """A tuple of collectives; `str()` gives a table by kind, axes and place."""

    @property
    def bytes_sent_per_step(self) -> int:
        return sum(one.bytes_sent_per_step for one in self)

    def __str__(self) -> str:
        if not self:
            return "No communication between devices."
        head = ("collective", "over", "where", "of", "arrays", "count each", "count per step")
        rows: list[tuple[str, ...]] = [(*head, "overlap", "sent each", "sent per step")]
        for (kind, axes, where), group in grouped(self):
            numbers = (
                sum(len(one.arrays) for one in group),
                len(group),
                sum(one.count_per_step for one in group),
            )
            per_step = sum(one.bytes_sent_per_step for one in group)
            over = " × ".join(axes) or f"groups of {group[0].group_size}"
            dtypes = ", ".join(sorted({array.dtype for one in group for array in one.arrays}))
            overlap = f"{sum(one.overlaps for one in group)} of {len(group)}"
            each = sum(one.bytes_sent for one in group)
            cells = kind, over, where, dtypes, *map(str, numbers), overlap
            rows.append((*cells, bytes_text(each), bytes_text(per_step)))
        rows.append(("total", *[""] * 8, bytes_text(self.bytes_sent_per_step)))
        return columns(rows)


def collectives(program: Program, mesh: Mesh) -> Collectives:
    """Returns the collectives of a compiled program, in order, without groups of one device."""
    found = (_collective(occurrences, program, mesh) for occurrences in _occurrences(program))
    return Collectives(one for one in found if one.group_size > 1)


_Alike = tuple[str, tuple[str, ...], str]


def grouped(found: Sequence[Collective]) -> Iterable[tuple[_Alike, list[Collective]]]:
    """Groups `found` by kind, mesh axes and place (`where`), in the order of first occurrence."""
    groups: dict[_Alike, list[Collective]] = {}
    for one in found:
        groups.setdefault((one.kind, one.mesh_axes, one.where), []).append(one)
    return groups.items()


class _Occurrence(NamedTuple):
    """A collective's instruction, and the scheduled instruction that contains it (often itself)."""

    instruction: Instruction
    place: Place
    scheduled: Instruction


def _occurrences(program: Program) -> list[list[_Occurrence]]:
    """Returns the occurrences of each collective, in schedule order.

    A TPU program can split a collective over several fusions, each with a copy of the instruction
    on the same channel.
    """
    found: dict[tuple[str, ...], list[_Occurrence]] = {}
    for one, place in program.instructions():
        if _kind(one) in KINDS:
            wrappers = itertools.takewhile(lambda each: each.opcode in _WRAPPERS, place.callers)
            *_, scheduled = one, *wrappers
            channel = one.attribute("channel_id") if scheduled.opcode == "fusion" else None
            key = (scheduled.computation.name, channel or f"%{one.name}")
            found.setdefault(key, []).append(_Occurrence(one, place, scheduled))
    return list(found.values())


def _kind(one: Instruction) -> str:
    between_slices = one.opcode == "send" and one.attribute(_BETWEEN_SLICES)
    kind = between_slices.lower().replace("_", "-") if between_slices else one.opcode
    return kind.removesuffix("-start")


def _collective(occurrences: list[_Occurrence], program: Program, mesh: Mesh) -> Collective:
    one, place, scheduled = occurrences[0]
    kind = _kind(one)
    inside = {each.opcode for each in one.computation.instructions}
    if kind == "all-reduce" and scheduled is not one and "dynamic-slice" in inside:
        # It is fused with the slice of this device's shard, so no device receives more than that.
        kind = "reduce-scatter"
    slices = _positions_by_slice(mesh)
    if one.opcode == "send":
        groups = slices.T  # the devices at the same position of each slice
    else:
        # Each slice runs the same program, which numbers the devices within a slice.
        within = _groups(one, slices.shape[1])
        groups = np.concatenate([positions[within] for positions in slices])
    size = groups.shape[1]
    arrays = _arrays(one)
    total = sum(array.bytes for array in arrays)
    ring = _RING.get(kind)
    op_name, each = one.op_name or _source(scheduled), "step"
    if place.loops:
        each = turn(place.op_name) or f"turn of {place.loops[-1].name}"
    return Collective(
        name=one.name,
        kind=kind,
        mesh_axes=spanned_axes(groups, mesh),
        group_size=size,
        arrays=arrays,
        bytes=total,
        bytes_sent=total if ring is None else round(ring * total * (size - 1) / size),
        count_per_step=place.times,
        each=each,
        phase=phase(op_name or place.op_name),
        overlaps=program.is_scheduled and _overlaps(scheduled, occurrences[-1].scheduled),
        assembles=kind == "all-reduce"
        and any(operand.opcode == "dynamic-update-slice" for operand in one.operands),
        op_name=op_name,
    )


def _positions_by_slice(mesh: Mesh) -> np.ndarray:
    """Returns the positions of each TPU slice's devices in the mesh's order, one slice per row."""
    indices = [getattr(device, "slice_index", 0) for device in mesh.devices.flat]
    if mesh.devices.flat[0].platform != "tpu":
        return np.arange(len(indices))[None]
    return np.array([np.flatnonzero(np.equal(indices, each)) for each in sorted(set(indices))])


def _groups(one: Instruction, devices: int) -> np.ndarray:
    """Returns the groups of device positions in the program's order, one per row."""
    groups = one.replica_groups
    if groups is not None:
        return groups
    pairs = one.source_target_pairs
    if pairs is None:
        return np.arange(devices)[None]
    return _cycles(pairs) if pairs else np.arange(devices)[:, None]


def _cycles(pairs: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns the groups of devices that pairs (source, target) connect."""
    group_of = {device: {device} for device in itertools.chain.from_iterable(pairs)}
    for source, target in pairs:
        joined = group_of[source] | group_of[target]
        for device in joined:
            group_of[device] = joined
    groups = {min(group): sorted(group) for group in group_of.values()}
    largest = max(len(group) for group in groups.values())
    return np.array([group for group in groups.values() if len(group) == largest])


def spanned_axes(groups: np.ndarray, mesh: Mesh) -> tuple[str, ...]:
    """Returns the mesh axes along which the devices of each group differ; () if there are none.

    A program numbers its devices in the order of `mesh.devices.flat`. Axes of size 1 are skipped.
    """
    wanted = {frozenset(group.tolist()) for group in groups}
    sizes = dict(mesh.shape)
    numbers = np.arange(mesh.devices.size).reshape(mesh.devices.shape)
    candidates = [name for name in mesh.axis_names if sizes[name] > 1]
    for count in range(1, len(candidates) + 1):
        for names in itertools.combinations(candidates, count):
            inside = [mesh.axis_names.index(name) for name in names]
            others = [axis for axis in range(numbers.ndim) if axis not in inside]
            width = math.prod(sizes[name] for name in names)
            spanned = numbers.transpose(*others, *inside).reshape(-1, width)
            if {frozenset(group.tolist()) for group in spanned} == wanted:
                return names
    return ()


def _arrays(one: Instruction) -> tuple[ArrayType, ...]:
    """Returns the whole arrays of a collective."""
    if one.opcode == "send" or one.opcode.startswith("ragged"):
        return one.operands[0].results  # the others are a token, or buffers and numbers of rows
    results, width = one.results, len(one.operands)
    operands = tuple(array for operand in one.operands for array in operand.results)
    if one.opcode.endswith("-start") and len(results) >= 2 * width:
        # The result of a start lists its operands, then the results of its end.
        operands, results = results[:width], results[width : 2 * width]
    if one.opcode.startswith("all-gather"):
        return results
    if width == 1:
        # A GPU program concatenates small arrays for one all-reduce.
        (joined,) = one.operands
        joined = joined.called["calls"][0].root if joined.opcode == "fusion" else joined
        if joined.opcode == "concatenate" and len(joined.results[0].shape) == 1:
            return tuple(part.results[0] for part in joined.operands)
    return operands


def _source(scheduled: Instruction) -> str:
    """Returns the `op_name` of an instruction, or of the nearest operand that has one."""
    waiting = [scheduled]
    for _ in range(_SEARCHED + 1):
        if not waiting:
            break
        one = waiting.pop(0)
        if one.op_name:
            return one.op_name
        waiting += one.operands
    return ""


def _overlaps(first: Instruction, last: Instruction) -> bool:
    """True if compute is scheduled between the start in `first` and the end in `last`."""
    schedule = first.computation.instructions
    begin, end = schedule.index(first), schedule.index(last)
    ended, ending = first, "-done"
    if first.opcode == "send":
        met = first.attribute(_RENDEZVOUS)
        received = (x for x in schedule if x.opcode == "recv" and x.attribute(_RENDEZVOUS) == met)
        ended, ending = next(received), "recv-done"
    if ended.opcode.endswith(("-start", "recv")):
        for index, one in enumerate(schedule):
            if ended not in one.operands:
                continue
            if one.opcode.endswith("-update"):  # it provides the data to send
                begin, ended = index, one
            elif one.opcode.endswith(ending):
                end = index
                break
    return any(_computes(one) for one in schedule[begin + 1 : end])


def _computes(one: Instruction) -> bool:
    if one.opcode == "custom-call":
        return one.attribute("custom_call_target") not in _BOOKKEEPING
    return one.opcode in _COMPUTES
