"""Parses the text of a compiled XLA program (`compiled.as_text()`) into linked instructions.

The format is the same for CPUs, GPUs and TPUs. If the header says `is_scheduled=true`, instructions
are listed in the order in which they start.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

from lmlib.plan.scopes import EVEN, Routing

_BITS = {"pred": 8, "token": 0, "opaque": 0}  # the other types have theirs in their names
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,<=]*)\](?:\{[^}]*?(?:S\((\d+)\))?\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^  (ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s([a-z][\w\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLS = re.compile(
    r"\b(body|condition|calls|to_apply|true_computation|false_computation|branch_computations|"
    r"called_computations)=(\{[^}]*\}|%[\w.\-]+)"
)
_RANGE = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_RANGED_GROUPS = re.compile(r"\[([\d,]+)\]<=" + _RANGE)
_MESH_GROUPS = re.compile(
    r"mesh\[([^\]]*)\](?:, device_ids=\(((?:[^()]|\([^()]*\))*)\))? \{([^}]*)\}"
)
HOST_MEMORY = 5  # XLA's number of it

# Opcodes whose `to_apply` runs as part of the program. A `call-start` begins work on a TPU's
# SparseCores.
_CALLING = {"call", "call-start"}
FUSIONS = {"fusion", "fusion-start"}  # GPUs copy slices ahead of time with the latter
# Opcodes that pass a value on unchanged.
_TRANSPARENT = {"copy", "bitcast", "convert", "copy-done", "reshape"}


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """One array of one device, without padding; `dtype` in XLA's spelling: "bf16", "pred".

    `memory` is XLA's number of the memory space: 0 for the device's memory, 1 for the memory on a
    TPU's chip, or `HOST_MEMORY`.
    """

    dtype: str
    shape: tuple[int, ...]
    memory: int = 0

    @property
    def bytes(self) -> int:
        named = re.search(r"\d+", self.dtype)
        bits = int(named.group()) if named else _BITS[self.dtype]
        return math.ceil(math.prod(self.shape) * bits / 8)


@dataclasses.dataclass(eq=False)
class Instruction:
    """One line of a computation.

    `results` has nested tuples flattened; `arguments` is the text in the parentheses, `attributes`
    the text after it.
    """

    computation: "Computation" = dataclasses.field(repr=False)
    name: str
    opcode: str
    results: tuple[ArrayType, ...]
    arguments: str
    attributes: str
    is_root: bool

    @functools.cached_property
    def operands(self) -> tuple["Instruction", ...]:
        """The instructions that it reads."""
        return tuple(self.computation.by_name[name] for name in _NAME.findall(self.arguments))

    @functools.cached_property
    def called(self) -> Mapping[str, tuple["Computation", ...]]:
        """The computations that it calls, by role: "body", "calls", …"""
        all_of_them = self.computation.program.computations
        return {
            role: tuple(all_of_them[name] for name in _NAME.findall(names))
            for role, names in _CALLS.findall(self.attributes)
        }

    @property
    def op_name(self) -> str:
        """The path of JAX transformations, scopes and the primitive, or ""."""
        return self.attribute("op_name") or ""

    def attribute(self, name: str) -> str | None:
        """The value of a plain attribute (`channel_id=7`, `dimensions={0}`), or `None`."""
        found = re.search(rf'\b{name}=("[^"]*"|\{{[^}}]*\}}|[^,\s]+)', self.attributes)
        return found.group(1).strip('"') if found else None

    @property
    def source_target_pairs(self) -> list[tuple[int, int]] | None:
        """(from, to) positions of a collective-permute's devices; `None` for other instructions."""
        found = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", self.attributes)
        return found and [(int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)", found[1])]

    @property
    def replica_groups(self) -> np.ndarray | None:
        """Groups of device positions, one per row; `None` for one group of all devices, or if the
        instruction has no groups."""
        found = re.search(r"replica_groups=(.*)", self.attributes)
        return found and parse_replica_groups(found[1])


@dataclasses.dataclass(eq=False)
class Computation:
    name: str
    program: "Program" = dataclasses.field(repr=False)
    instructions: list[Instruction] = dataclasses.field(default_factory=list)

    @property
    def root(self) -> Instruction:
        return next(one for one in reversed(self.instructions) if one.is_root)

    @functools.cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return {one.name: one for one in self.instructions}


@dataclasses.dataclass(frozen=True)
class Loop:
    """A while loop. `trips` is `None` if the number of iterations is unknown. If the routing of
    experts decides it, `Program.routing` is assumed."""

    name: str
    op_name: str
    trips: int | None


@dataclasses.dataclass(frozen=True)
class Place:
    """The loops around an instruction, outermost first, and the instruction that calls its
    computation, with its place; `None` in the entry."""

    loops: tuple[Loop, ...] = ()
    caller: "tuple[Instruction, Place] | None" = None

    @property
    def callers(self) -> Iterator[Instruction]:
        """The instructions around it, innermost first."""
        place = self
        while place.caller is not None:
            caller, place = place.caller
            yield caller

    @property
    def op_name(self) -> str:
        """The name of the innermost loop, or ""."""
        return self.loops[-1].op_name if self.loops else ""

    @property
    def times(self) -> int:
        """Number of executions in a run; loops of unknown length count as one iteration."""
        return math.prod(1 if loop.trips is None else loop.trips for loop in self.loops)


@dataclasses.dataclass(eq=False)
class Program:
    is_scheduled: bool
    computations: dict[str, Computation] = dataclasses.field(default_factory=dict)
    entry: str = ""
    routing: Routing = EVEN

    def instructions(self) -> Iterator[tuple[Instruction, Place]]:
        """Yields every instruction that a run executes, once for each path from the entry.

        Both branches of a conditional count. Scalar functions of reductions and sorts are skipped.
        """
        return _reached(self.computations[self.entry], Place())


def _reached(computation: Computation, place: Place) -> Iterator[tuple[Instruction, Place]]:
    for one in computation.instructions:
        yield one, place
        for role, called in one.called.items():
            if role == "condition" or (role == "to_apply" and one.opcode not in _CALLING):
                continue
            loops = (*place.loops, _loop(one)) if role == "body" else place.loops
            for each in called:
                yield from _reached(each, Place(loops, (one, place)))


def _loop(loop: Instruction) -> Loop:
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    trips = loop.computation.program.routing.turns(loop.op_name)
    if trips is None:
        trips = int(known[1]) if known else _counted_trips(loop)
    return Loop(loop.name, loop.op_name, trips)


def _counted_trips(loop: Instruction) -> int | None:
    """Returns the trips of a loop `for (i = start; i < limit; i++)`, the form of `lax.scan`."""
    comparison, outer = loop.called["condition"][0].root, None
    if comparison.opcode == "fusion":  # the comparison is inside, and sees its operands
        outer, comparison = comparison, comparison.called["calls"][0].root
    if comparison.opcode != "compare" or comparison.attribute("direction") != "LT":
        return None
    (initial,) = loop.operands
    sides = []
    for value in comparison.operands:
        if value.opcode == "parameter" and outer is not None:
            value = outer.operands[int(value.arguments)]
        if value.opcode == "get-tuple-element":
            value = initial.operands[int(value.attribute("index") or 0)]
        while value.opcode in _TRANSPARENT:
            value = value.operands[0]
        is_integer = value.opcode == "constant" and re.fullmatch(r"-?\d+", value.arguments)
        if not is_integer:
            return None
        sides.append(int(value.arguments))
    start, limit = sides
    return limit - start


def read_program(text: str, routing: Routing = EVEN) -> Program:
    """Parses the text of `jax.stages.Compiled.as_text()`.

    Raises:
      ValueError: if the text is not an optimized XLA program.
    """
    program = Program("is_scheduled=true" in text[: text.find("\n")], routing=routing)
    computation = Computation("", program)
    for line in text.splitlines():
        if line.startswith("  "):
            if (one := _instruction(line, computation)) is not None:
                computation.instructions.append(one)
        elif header := _HEADER.match(line):
            computation = Computation(header[2], program)
            program.computations[header[2]] = computation
            program.entry = header[2] if header[1] else program.entry
    if not program.entry:
        raise ValueError("not an optimized XLA program: there is no ENTRY computation")
    return program


def _instruction(line: str, computation: Computation) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if found is None:
        return None
    after_type = _closing(line, found.end()) if line[found.end()] == "(" else found.end()
    opcode = _OPCODE.search(line, after_type)
    if opcode is None:
        return None
    end = _closing(line, opcode.end() - 1)
    results = tuple(
        ArrayType(dtype, _integers(shape.replace("<=", "")), int(memory or 0))
        for dtype, shape, memory in _ARRAY.findall(line, found.end(), opcode.start())
    )
    arguments = line[opcode.end() : end - 1]
    is_root = found[1] is not None
    return Instruction(computation, found[2], opcode[1], results, arguments, line[end:], is_root)


def _closing(line: str, opening: int) -> int:
    """Returns the index after the parenthesis that closes the one at `opening`."""
    depth = 0
    for found in re.finditer(r"[()]", line[opening:]):
        depth += 1 if found.group() == "(" else -1
        if depth == 0:
            return opening + found.end()
    raise ValueError(f"unbalanced parentheses: {line[:80]!r}")


def _integers(text: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",")) if text else ()


def parse_replica_groups(text: str) -> np.ndarray | None:
    """Parses the groups of devices at the start of `text`, one per row; `None` for "{}".

    There are three spellings: lists `{{0,1},{2,3}}`; a transposed range `[2,4]<=[4,2]T(1,0)`; and
    mesh axes `mesh['a'=4,'b'=2] {'a'}`, where `'a':(2)2` is the part of size 2 of an axis with a
    part of size 2 to its left.
    """
    if text.startswith("{}"):
        return None
    if text.startswith("{"):
        groups = re.findall(r"\{([\d,]+)\}", text[: text.index("}}") + 2])
        return np.array([_integers(group) for group in groups])
    if ranged := _RANGED_GROUPS.match(text):
        return _range(*ranged.group(2, 3)).reshape(_integers(ranged[1]))
    if in_mesh := _MESH_GROUPS.match(text):
        return _mesh_groups(*in_mesh.groups())
    raise ValueError(f"unknown spelling of replica groups: {text[:60]!r}")


def _range(shape: str, order: str | None) -> np.ndarray:
    """Returns the numbers from 0 in a shape such as "4,2", transposed by an order such as "1,0"."""
    sizes = _integers(shape)
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    return numbers.transpose(_integers(order) or range(len(sizes)))


def _mesh_groups(axes: str, devices: str | None, chosen: str) -> np.ndarray:
    sizes = {name: int(size) for name, size in re.findall(r"'?([\w.\-]+)'?=(\d+)", axes)}
    pieces = [
        (name, int(begin or 1), int(begin or 1) * int(size or sizes[name]))
        for name, begin, size in re.findall(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?(?:,|$)", chosen)
    ]
    # Each axis is cut where a chosen piece of it begins or ends.
    shape: list[int] = []
    inside: list[int] = []
    for name, size in sizes.items():
        own = [(begin, end) for axis, begin, end in pieces if axis == name]
        for begin, end in itertools.pairwise(sorted({1, size, *itertools.chain(*own)})):
            if any(first <= begin and end <= last for first, last in own):
                inside.append(len(shape))
            shape.append(end // begin)
    numbers = np.arange(math.prod(shape))
    if devices:
        ranged = re.match(_RANGE, devices)
        numbers = np.ravel(_range(*ranged.groups()) if ranged else _integers(devices))
    outside = [axis for axis in range(len(shape)) if axis not in inside]
    group_size = math.prod(shape[axis] for axis in inside)
    return numbers.reshape(shape).transpose(*outside, *inside).reshape(-1, group_size)
