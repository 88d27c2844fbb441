"""The memory that a step needs on each device."""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding

from lmlib.data.batch import Batch
from lmlib.experiment import Experiment
from lmlib.hardware.free_memory import bytes_per_device
from lmlib.hardware.specifications import Accelerator
from lmlib.inspect.saved_activations import (
    SavedActivations,
    saved_activations,
)
from lmlib.parallel.axes import Weight, map_weights
from lmlib.parallel.layout import COMPUTE, num_shards, storage_spec
from lmlib.plan.program import FUSIONS, HOST_MEMORY, ArrayType, Instruction, Program
from lmlib.state import State
from lmlib.terminal.quantities import bytes_text
from lmlib.terminal.table import columns

# About this fraction of a GPU's memory is left by the driver, NCCL and cuDNN.
_USABLE_ON_GPU = 0.95
# JAX takes this fraction unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
_TAKEN_BY_JAX = 0.75
_IN_A_FOLDER = 2  # bytes of a number: nearly all folders are published in bfloat16
_READ = 4  # bytes of a number that was read, before it is converted to its own dtype


@dataclasses.dataclass(frozen=True)
class LargeArray:
    """One array of one device, with XLA's name for it."""

    name: str
    bytes: int
    shape: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class OutOfMemory:
    """The TPU compiler's message about a step that does not fit, in bytes.

    `temporaries_only` is True if state and batch come on top of `needed`.
    """

    needed: int
    temporaries_only: bool
    largest: tuple[LargeArray, ...]


@dataclasses.dataclass(frozen=True)
class Counted:
    """XLA's count of one device's bytes for the compiled step.

    `arguments` are state and batch, `outputs` only the metrics. `temporaries` is the sum of all
    temporaries, which need not exist at the same time; `peak` the largest bytes in use, with
    arguments, outputs and arrays on a TPU's chip, or `None` if XLA does not say.
    """

    arguments: int
    outputs: int
    temporaries: int
    program: int
    peak: int | None
    on_host: int
    tpu_program: int | None = None

    @property
    def needed(self) -> int:
        if self.tpu_program is not None:
            return self.arguments + self.outputs + self.tpu_program
        # On TPUs `temporaries` counts the gaps between arrays twice, so the peak decides, unless it
        # has arrays on the chip.
        return min(self.peak or self.in_memory, self.in_memory) + self.program

    @property
    def in_memory(self) -> int:
        """All arguments, outputs and temporaries, which are in the device's memory."""
        return self.arguments + self.outputs + self.temporaries

    @property
    def on_chip(self) -> int:
        """Bytes of the peak that are not in the device's memory: TPUs' arrays on the chip."""
        return max((self.peak or 0) - self.in_memory, 0)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    `loading` is the peak while weights are read, 0 if none are. `step` is the need of the step, a
    lower bound if XLA stopped and `counted` is `None`. `saved` has the activations that one
    microbatch saves for its backward pass. `capacity` is `None` if unknown.
    """

    capacity: int | None
    parameters: int
    frozen: int
    reference_model: int
    optimizer_state: int
    gradients: int
    batch: int
    saved: SavedActivations
    counted: Counted | None
    loading: int
    step: int
    largest_arrays: tuple[LargeArray, ...]
    remarks: tuple[str, ...]

    @property
    def needed(self) -> int:
        """Bytes of the step, or of reading the weights before it if these are more."""
        return max(self.step, self.loading)

    @property
    def fits(self) -> bool | None:
        """`None` if the capacity is unknown."""
        return None if self.capacity is None else self.needed <= self.capacity

    @property
    def verdict(self) -> str:
        needed = bytes_text(self.needed) + " to read the weights" * (self.loading > self.step)
        if self.capacity is None:
            return f"needs {needed}; the capacity depends on the machine"
        capacity, spare = bytes_text(self.capacity), self.capacity - self.needed
        if spare >= 0:
            return f"fits: needs {needed} of {capacity}, {bytes_text(spare)} to spare"
        at_least = "at least " * (self.counted is None)
        return (
            f"does not fit: needs {at_least}{needed} of {capacity}, {bytes_text(-spare)} too much"
        )

    def __str__(self) -> str:
        rows = [
            ("parameters", self.parameters, "as stored"),
            ("frozen weights", self.frozen, "as stored"),
            ("reference model", self.reference_model, "the objective's second model, frozen"),
            ("optimizer state", self.optimizer_state, "as stored"),
            ("batch", self.batch, "as stored"),
            ("gradients", self.gradients, "a temporary"),
        ]
        for kept in self.saved.together:
            shape = " × ".join(map(str, kept.shape))
            note = f"a temporary, {kept.dtype} {shape} over all devices"
            rows.append((f"saved {kept.name}", kept.bytes_per_device, note))
        if self.loading > self.step:
            note = "before the first step, with the weights read so far"
            rows.append(("reading weights", self.loading, note))
        if (counted := self.counted) is None:
            rows.append(("needed at least", self.step, ""))
        else:
            rows += [
                ("all arguments", counted.arguments, "state and batch"),
                ("all temporaries", counted.temporaries, "not all in use at once"),
                ("program", counted.program, ""),
                ("these in memory", counted.tpu_program or 0, "the compiler's count of both"),
                ("peak", counted.peak or 0, "most bytes in use at once"),
                ("of it on the chip", counted.on_chip, "at least, and not in the memory"),
                ("on the host", counted.on_host, "offloaded"),
            ]
        shown = [(name, bytes_text(size), note) for name, size, note in rows if size]
        blocks = [self.verdict, columns([("on each device", "", ""), *shown])]
        if self.largest_arrays:
            arrays = [(f"  {one.name}", bytes_text(one.bytes)) for one in self.largest_arrays]
            blocks.append(f"the largest temporaries, with XLA's names\n{columns(arrays)}")
        return "\n\n".join([*blocks, *filter(None, ["\n".join(self.remarks)])])


def memory(
    experiment: Experiment,
    state: State,
    batch: Batch,
    accelerator: Accelerator,
    result: jax.stages.Compiled | OutOfMemory,
    program: Program | None,
    log: str = "",
) -> Memory:
    """Returns the memory of the step of `experiment` on one device.

    `state` and `batch` are `ShapeDtypeStruct`s with shardings. `program` is the text of `result`,
    read; `None` if the step does not fit. `log` is the compiler's.
    """
    saved = saved_activations(experiment)
    whole = accelerator.memory_bytes
    on_gpu = accelerator.platform in ("cuda", "rocm")
    parts = (state.model, state.frozen, state.reference_model, state.optimizer)
    parameters, frozen, reference_model, optimizer = map(bytes_per_device, parts)
    there, size = parameters + frozen + reference_model + optimizer, bytes_per_device(batch)
    if isinstance(result, OutOfMemory):
        counted, arrays = None, result.largest
        step = result.needed + (there + size if result.temporaries_only else 0)
    else:
        assert program is not None
        found = result.memory_analysis()
        assert found is not None
        counted = Counted(
            arguments=found.argument_size_in_bytes,
            outputs=found.output_size_in_bytes - found.alias_size_in_bytes,
            temporaries=found.temp_size_in_bytes,
            program=found.generated_code_size_in_bytes,
            # On CPUs this number lacks the temporaries.
            peak=None if accelerator.platform == "cpu" else found.peak_memory_in_bytes,
            on_host=found.host_temp_size_in_bytes,
            tpu_program=_of_tpu_program(log),
        )
        arrays, step = largest_arrays(program), counted.needed
    for_reading = reading(experiment)
    return Memory(
        capacity=round(whole * _USABLE_ON_GPU) if whole and on_gpu else whole,
        parameters=parameters,
        frozen=frozen,
        reference_model=reference_model,
        optimizer_state=optimizer,
        gradients=parameters,
        batch=size,
        saved=saved,
        counted=counted,
        # A continued run has its optimizer state before it reads the frozen weights.
        loading=there + for_reading if for_reading else 0,
        step=step,
        largest_arrays=arrays,
        remarks=(*_remarks(accelerator, step), *_on_copies(experiment, saved)),
    )


def _remarks(accelerator: Accelerator, needed: int) -> Iterator[str]:
    if accelerator.platform == "cpu":
        yield "These temporaries are from the compiler for CPUs; other compilers need fewer."
    if accelerator.platform in ("cuda", "rocm"):
        assert accelerator.memory_bytes is not None
        yield (
            f"{_USABLE_ON_GPU:.0%} of the card's {bytes_text(accelerator.memory_bytes)} count as "
            "usable; the driver, NCCL and cuDNN take the rest."
        )
        if _TAKEN_BY_JAX < needed / accelerator.memory_bytes <= _USABLE_ON_GPU:
            yield (
                f"JAX takes {_TAKEN_BY_JAX:.0%} of it by default: set "
                f"XLA_PYTHON_CLIENT_MEM_FRACTION={_USABLE_ON_GPU}"
            )


def _on_copies(experiment: Experiment, saved: SavedActivations) -> Iterator[str]:
    """A remark if tensor parallelism without sequence parallelism keeps copies of activations."""
    parts = num_shards(COMPUTE["mlp"], experiment.mesh)
    if parts > 1 and not experiment.compute.sequence_parallel:
        kept = sum(one.bytes_per_device for one in saved if one.name == "layer_input")
        yield (
            f"The {parts} devices along `tensor` keep the same layer inputs, {bytes_text(kept)} "
            "each: --fdl.compute.sequence_parallel=True splits them."
        )


# Opcodes that only pass arrays on, or stand for the program's arguments.
_MAKES_NOTHING = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional"),
    *("call", "call-start", "call-update", "call-done", "optimization-barrier"),
}


def largest_arrays(program: Program, count: int = 3) -> tuple[LargeArray, ...]:
    """Returns the largest arrays that a program makes on one device, by type and JAX operation.

    Equal arrays count once, and an array counts where it is made, not where slices of it are
    replaced. They need not exist at the same time. Padding on TPUs is not counted.
    """
    found: dict[str, LargeArray] = {}
    for instruction, place in program.instructions():
        fused = any(caller.opcode in FUSIONS for caller in place.callers)
        if fused or instruction.opcode in _MAKES_NOTHING:
            continue
        operation = "/".join(instruction.op_name.split("/")[-2:])
        for array in _made(instruction):
            if array.memory != HOST_MEMORY:
                shape = ",".join(map(str, array.shape))
                name = f"{array.dtype}[{shape}] {operation}".rstrip()
                found[name] = LargeArray(name, array.bytes, shape=array.shape)
    return tuple(sorted(found.values(), key=lambda one: -one.bytes)[:count])


def _made(one: Instruction) -> Iterator[ArrayType]:
    """Yields its results, except arrays that it is given and replaces a slice of in place."""
    root = one.called["calls"][0].root if one.opcode == "fusion" else one
    values = root.operands if root.opcode == "tuple" else (root,)
    if len(values) != len(one.results):  # results are nested
        yield from one.results
        return
    for array, value in zip(one.results, values, strict=True):
        given = value
        while given.opcode in ("bitcast", "dynamic-update-slice"):
            given = given.operands[0]
        if given is value or (one is not root and given.opcode != "parameter"):
            yield array


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)"
_ALLOCATION = re.compile(
    rf"Size: {_SIZE}(?:\s+Operator: op_name=\"([^\"]*)\"[^\n]*)?"
    r"\s+Shape: (\S+)"
)


_OF_TPU_PROGRAM = re.compile(rf"XLA::TPU program HBM usage: {_SIZE} ")


def _of_tpu_program(log: str) -> int | None:
    """Temporaries and program of the last program in a TPU compiler's log."""
    found = _OF_TPU_PROGRAM.findall(log)
    return _bytes(*found[-1]) if found else None


def out_of_memory(message: str) -> OutOfMemory | None:
    """Reads XLA's error message; `None` if it is about something else."""
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    temporaries = re.search(rf"HLO temporaries \({_SIZE}\) exceeds", message)
    used = temporaries or re.search(rf"Used {_SIZE} of", message)
    if used is None:
        return None
    largest = tuple(
        LargeArray(f"{found[4]} {found[3] or ''}".strip(), _bytes(*found.group(1, 2)))
        for found in _ALLOCATION.finditer(message)
    )
    return OutOfMemory(_bytes(*used.group(1, 2)), temporaries is not None, largest[:5])


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])


def reading(experiment: Experiment) -> int:
    """Returns the bytes per device that reading weights takes, without the weights themselves.

    0 if a run of `experiment` reads no weights. Each device holds a slice of a tensor, the whole
    tensor, and its part of a layer's weight, as described in `lmlib.hf.load`. The largest weight
    decides.
    """
    mesh, reference_model = experiment.mesh, experiment.objective.reference_model
    found = [0]

    def count(weight: Weight, array: Any) -> None:
        stacked = weight.stacked > 0
        shape = array.shape[stacked:]
        layout = NamedSharding(mesh, storage_spec(weight, array.shape, mesh))
        part = math.prod(layout.shard_shape(array.shape)[stacked:])
        size = math.prod(shape)
        share = -(-size // mesh.devices.size)
        found.append(_IN_A_FOLDER * (share + size) + _READ * part)

    if experiment.init_from is not None:
        map_weights(count, experiment.recipe.bare)
    recipe = experiment.reference_recipe
    if recipe is not None and reference_model is not None and reference_model.weights_from:
        map_weights(count, recipe.bare)
    return max(found)
