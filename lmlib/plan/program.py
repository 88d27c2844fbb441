"""Parses the text of a compiled XLA program (`compiled.as_text()`).

The result has what the reports in this folder need: opcodes, array types, operands, calls, trip
counts of loops, and device groups of collectives. The format is the same for CPUs, GPUs and TPUs.
If the header says `is_scheduled=true`, instructions are listed in the order in which they start.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

from lmlib.plan.scopes import turns_in_even_routing

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
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
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


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    `results` has nested tuples flattened; `arguments` is the text in the parentheses, `attributes`
    the text after it. `called` has the computations that it calls, by role ("body", "calls", …).
    """

    name: str
    opcode: str
    results: tuple[ArrayType, ...]
    arguments: str
    called: Mapping[str, tuple[str, ...]]
    attributes: str
    is_root: bool

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of the instructions that it reads."""
        return tuple(_NAME.findall(self.arguments))

    @property
    def op_name(self) -> str:
        """The path of JAX transformations, scopes and the primitive, or ""."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found.group(1) if found else ""

    def attribute(self, name: str) -> str | None:
        """The value of a plain attribute (`channel_id=7`, `dimensions={0}`), or `None`."""
        found = re.search(rf'\b{name}=("[^"]*"|\{{[^}}]*\}}|[^,\s]+)', self.attributes)
        return found.group(1).strip('"') if found else None

    @property
    def source_target_pairs(self) -> list[tuple[int, int]] | None:
        """(from, to) positions of a collective-permute's devices; `None` for other instructions."""
        found = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", self.attributes)
        if found is None:
            return None
        return [(int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)", found.group(1))]

    @property
    def replica_groups(self) -> np.ndarray | None:
        """Groups of device positions, one per row; `None` for one group of all devices, or if the
        instruction has no groups."""
        found = re.search(r"replica_groups=", self.attributes)
        return None if found is None else parse_replica_groups(self.attributes[found.end() :])


@dataclasses.dataclass(frozen=True)
class Computation:
    name: str
    instructions: tuple[Instruction, ...]

    @property
    def root(self) -> Instruction:
        return next(one for one in reversed(self.instructions) if one.is_root)

    @functools.cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return {one.name: one for one in self.instructions}


@dataclasses.dataclass(frozen=True)
class Loop:
    """A while loop. `trips` is `None` if the number of iterations is unknown. If the routing of
    experts decides it, even routing is assumed."""

    name: str
    op_name: str
    trips: int | None


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of an instruction: its computation and the loops around it, outermost first.

    `caller` is the instruction that calls the computation, with its place; `None` in the entry.
    """

    computation: Computation
    loops: tuple[Loop, ...]
    caller: "tuple[Instruction, Place] | None" = None

    @property
    def callers(self) -> Iterator[Instruction]:
        """The instructions around it, innermost first."""
        place = self
        while place.caller is not None:
            caller, place = place.caller
            yield caller

    @property
    def times(self) -> int:
        """Number of executions in a run; loops of unknown length count as one iteration."""
        return math.prod(1 if loop.trips is None else loop.trips for loop in self.loops)


@dataclasses.dataclass(frozen=True)
class Program:
    computations: Mapping[str, Computation]
    entry: Computation
    is_scheduled: bool

    def instructions(self) -> Iterator[tuple[Instruction, Place]]:
        """Yields every instruction that a run executes, once for each path from the entry.

        Both branches of a conditional count. Scalar functions of reductions and sorts are skipped.
        """
        return self._reached(Place(self.entry, ()))

    def _reached(self, place: Place) -> Iterator[tuple[Instruction, Place]]:
        for one in place.computation.instructions:
            yield one, place
            for role, names in one.called.items():
                if role == "condition" or (role == "to_apply" and one.opcode not in _CALLING):
                    continue
                loops = place.loops
                if role == "body":
                    loops = (*loops, self._loop(one, place.computation))
                for name in names:
                    inner = Place(self.computations[name], loops, (one, place))
                    yield from self._reached(inner)

    def _loop(self, loop: Instruction, around: Computation) -> Loop:
        known = _TRIP_COUNT.search(loop.attributes)
        trips = turns_in_even_routing(loop.op_name)
        if trips is None:
            trips = int(known.group(1)) if known else self._counted_trips(loop, around)
        return Loop(loop.name, loop.op_name, trips)

    def _counted_trips(self, loop: Instruction, around: Computation) -> int | None:
        """Returns the trips of a loop `for (i = start; i < limit; i++)`, the form of `lax.scan`."""
        condition = self.computations[loop.called["condition"][0]]
        outer, comparison = condition, condition.root
        fused: tuple[str, ...] = ()
        if comparison.opcode == "fusion":  # the comparison is inside, and sees its operands
            fused = comparison.operands
            condition = self.computations[comparison.called["calls"][0]]
            comparison = condition.root
        if comparison.opcode != "compare" or comparison.attribute("direction") != "LT":
            return None
        (initial,) = loop.operands
        sides = []
        for operand in comparison.operands:
            value, where = condition.by_name[operand], condition
            if value.opcode == "parameter" and fused:
                value, where = outer.by_name[fused[int(value.arguments)]], outer
            if value.opcode == "get-tuple-element":
                index = int(value.attribute("index") or 0)
                sides.append(_constant(around.by_name[initial].operands[index], around))
            else:
                sides.append(_constant(value.name, where))
        start, limit = sides
        return None if start is None or limit is None else limit - start


def read_program(text: str) -> Program:
    """Parses the text of `jax.stages.Compiled.as_text()`.

    Raises:
      ValueError: if the text is not an optimized XLA program.
    """
    computations: dict[str, Computation] = {}
    entry, name, instructions = None, "", []
    for line in text.splitlines():
        if line.startswith("  "):
            instruction = _instruction(line)
            if instruction is not None:
                instructions.append(instruction)
        elif header := _HEADER.match(line):
            name, instructions = header.group(2), []
            entry = name if header.group(1) else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, tuple(instructions))
    if entry is None:
        raise ValueError("not an optimized XLA program: there is no ENTRY computation")
    header_line = text[: text.find("\n")]
    return Program(computations, computations[entry], "is_scheduled=true" in header_line)


def parse_replica_groups(text: str) -> np.ndarray | None:
    """Parses the groups of devices at the start of `text`, one per row; `None` for "{}".

    There are three spellings: lists `{{0,1},{2,3}}`; a transposed range `[2,4]<=[4,2]T(1,0)`; and
    mesh axes `mesh['a'=4,'b'=2] {'a'}`, where `'a':(2)2` is the part of size 2 of an axis with a
    part of size 2 to its left.
    """
    if text.startswith("{"):
        return _listed_groups(text)
    if text.startswith("["):
        return _ranged_groups(text)
    if text.startswith("mesh["):
        return _mesh_groups(text)
    raise ValueError(f"unknown spelling of replica groups: {text[:60]!r}")


def _listed_groups(text: str) -> np.ndarray | None:
    if text.startswith("{}"):
        return None
    listed = text[: text.index("}}") + 2]
    groups = [
        [int(number) for number in group.split(",")]
        for group in re.findall(r"\{([\d,]+)\}", listed)
    ]
    return np.array(groups)


def _ranged_groups(text: str) -> np.ndarray:
    found = re.match(r"\[([\d,]+)\]<=(.*)", text)
    if found is None:
        raise ValueError(f"unknown spelling of replica groups: {text[:60]!r}")
    return _range(found.group(2)).reshape(_integers(found.group(1)))


def _range(text: str) -> np.ndarray:
    """Parses `[4,2]T(1,0)`: 0 to 7 in the shape (4, 2), then transposed."""
    found = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if found is None:
        raise ValueError(f"unknown spelling of a range of devices: {text[:60]!r}")
    shape, order = (_integers(numbers) for numbers in found.groups())
    return np.arange(math.prod(shape)).reshape(shape).transpose(order or range(len(shape)))


def _mesh_groups(text: str) -> np.ndarray:
    pattern = r"mesh\[([^\]]*)\](?:, device_ids=\(((?:[^()]|\([^()]*\))*)\))? \{([^}]*)\}"
    found = re.match(pattern, text)
    if found is None:
        raise ValueError(f"unknown spelling of replica groups: {text[:60]!r}")
    axes, devices, chosen = found.groups()
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
        listed = _range(devices) if devices.startswith("[") else np.array(_integers(devices))
        numbers = listed.reshape(-1)
    outside = [axis for axis in range(len(shape)) if axis not in inside]
    group_size = math.prod(shape[axis] for axis in inside)
    return numbers.reshape(shape).transpose(*outside, *inside).reshape(-1, group_size)


def _integers(text: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",")) if text else ()


def _instruction(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if found is None:
        return None
    after_type = _closing(line, found.end()) if line[found.end()] == "(" else found.end()
    opcode = _OPCODE.search(line, after_type)
    if opcode is None:
        return None
    end = _closing(line, opcode.end() - 1)
    attributes = line[end:]
    called = {role: tuple(_NAME.findall(names)) for role, names in _CALLS.findall(attributes)}
    return Instruction(
        name=found.group(2),
        opcode=opcode.group(1),
        results=tuple(
            ArrayType(dtype, _integers(shape.replace("<=", "")), int(memory or 0))
            for dtype, shape, memory in _ARRAY.findall(line, found.end(), opcode.start())
        ),
        arguments=line[opcode.end() : end - 1],
        called=called,
        attributes=attributes,
        is_root=found.group(1) is not None,
    )


def _closing(line: str, opening: int) -> int:
    """Returns the index after the parenthesis that closes the one at `opening`."""
    depth = 0
    for found in re.finditer(r"[()]", line[opening:]):
        depth += 1 if found.group() == "(" else -1
        if depth == 0:
            return opening + found.end()
    raise ValueError(f"unbalanced parentheses: {line[:80]!r}")


def _constant(name: str, computation: Computation) -> int | None:
    """Returns the value of an instruction that is a constant integer, or `None`."""
    one = computation.by_name[name]
    while one.opcode in _TRANSPARENT:
        one = computation.by_name[one.operands[0]]
    is_integer = one.opcode == "constant" and re.fullmatch(r"-?\d+", one.arguments)
    return int(one.arguments) if is_integer else None
