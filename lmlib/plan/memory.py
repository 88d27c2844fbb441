"""What a step holds in the memory of each device."""

import dataclasses
from collections.abc import Iterable

import jax

from lmlib.activations import SavedActivation, saved_activations
from lmlib.hardware import Accelerator
from lmlib.plan.abstract_step import AbstractStep
from lmlib.plan.advice import advice
from lmlib.plan.largest_arrays import LargeArray, largest_arrays
from lmlib.plan.out_of_memory import OutOfMemory
from lmlib.plan.parts import Part, bytes_per_device, largest, size_text, table
from lmlib.plan.program import Program
from lmlib.table import columns

# What the driver, NCCL and cuDNN leave of a GPU's memory, about.
_USABLE_ON_GPU = 0.95
# What JAX takes of it unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
_TAKEN_BY_JAX = 0.75


@dataclasses.dataclass(frozen=True)
class Counted:
    """Bytes of one device as XLA counts them for the compiled step.

    `arguments` are state and batch. The new state takes the old one's place, so `outputs` are the
    metrics alone. `temporaries` need not all be there at once: `peak` is what is in use at the
    worst moment, arguments and outputs included; `None`: XLA does not say. `on_host` is what the
    device offloads to its host's memory.
    """

    arguments: int
    outputs: int
    temporaries: int
    program: int
    peak: int | None
    on_host: int

    @property
    def needed(self) -> int:
        # On TPUs programs are accepted whose temporaries alone exceed the memory: the peak counts.
        in_use = self.peak or self.arguments + self.outputs + self.temporaries
        return in_use + self.program


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    Args:
      capacity: what programs have; `None`: unknown.
      parameters, optimizer_state, batch: the step's arguments; a few counters are left out.
      gradients: of the weights, as large as they.
      saved: what one microbatch keeps for its backward pass, by name, shapes global.
      counted: by XLA; `None` if there is no room, and XLA stopped there.
      needed: what the step needs altogether; at least, if `counted` is `None`.
      largest: the three largest parts, and what to change to have less of each.
      largest_arrays: among the temporaries, as XLA names them.
      remarks: what else to know.
    """

    capacity: int | None
    parameters: int
    optimizer_state: int
    gradients: int
    batch: int
    saved: tuple[SavedActivation, ...]
    counted: Counted | None
    needed: int
    largest: tuple[Part, ...]
    largest_arrays: tuple[LargeArray, ...]
    remarks: tuple[str, ...]

    @property
    def fits(self) -> bool | None:
        """`None` where the capacity is unknown."""
        return None if self.capacity is None else self.needed <= self.capacity

    @property
    def verdict(self) -> str:
        needed = size_text(self.needed)
        if self.capacity is None:
            return f"needs {needed}; how much there is depends on the machine"
        capacity = size_text(self.capacity)
        if self.fits:
            spare = size_text(self.capacity - self.needed)
            return f"fits: needs {needed} of {capacity}, {spare} to spare"
        at_least = "at least " if self.counted is None else ""
        over = size_text(self.needed - self.capacity)
        return f"does not fit: needs {at_least}{needed} of {capacity}, {over} too much"

    def __str__(self) -> str:
        rows = [("on each device", "bytes", ""), *map(_row, self._parts())]
        blocks = [self.verdict, columns(rows)]
        if self.largest_arrays:
            blocks.append(table("the largest temporaries, as XLA has them", self.largest_arrays))
        blocks.append(table("the three largest parts, and what to change", self.largest))
        if self.remarks:
            blocks.append("\n".join(self.remarks))
        return "\n\n".join(blocks)

    def _parts(self) -> Iterable[Part]:
        yield Part("parameters", self.parameters, "as stored")
        yield Part("optimizer state", self.optimizer_state)
        yield Part("batch", self.batch)
        yield Part("gradients", self.gradients, "a temporary")
        for kept in self.saved:
            shape = " × ".join(map(str, kept.shape))
            remark = f"a temporary, {kept.dtype} {shape} over all devices"
            yield Part(f"saved {kept.name}", kept.bytes_per_device, remark)
        if self.counted is None:
            yield Part("needed at least", self.needed)
            return
        yield Part("all arguments", self.counted.arguments, "state and batch")
        yield Part("all temporaries", self.counted.temporaries, "not all of them at a time")
        yield Part("program", self.counted.program)
        if self.counted.peak is not None:
            yield Part("peak", self.counted.peak, "in use at the worst moment")
        if self.counted.on_host:
            yield Part("on the host", self.counted.on_host, "offloaded")


def _row(part: Part) -> tuple[str, str, str]:
    return part.name, f"{part.bytes:,}".rjust(17), part.advice


def memory(
    step: AbstractStep,
    accelerator: Accelerator,
    result: jax.stages.Compiled | OutOfMemory,
    program: Program | None,
) -> Memory:
    """Sums up one device.

    Args:
      step: what was compiled.
      result: what came of it.
      program: that of `result`; `None` if there was no room.
    """
    saved = saved_activations(step.experiment)
    parameters = bytes_per_device(step.state.model)
    optimizer_state = bytes_per_device(step.state.optimizer)
    batch = bytes_per_device(step.batch)
    if isinstance(result, OutOfMemory):
        arguments = parameters + optimizer_state + batch
        counted, arrays = None, result.largest
        needed = result.needed + (arguments if result.temporaries_only else 0)
        temporaries = needed - arguments
    else:
        assert program is not None
        counted, arrays = _counted(result, accelerator), largest_arrays(program)
        needed = counted.needed
        temporaries = needed - counted.arguments - counted.program
    parts = [
        Part("parameters", parameters),
        Part("optimizer state", optimizer_state),
        Part("batch", batch),
        Part("gradients", parameters),
        *(Part(f"saved {kept.name}", kept.bytes_per_device) for kept in saved),
        Part("other temporaries", temporaries - parameters - saved.bytes_per_device),
    ]
    return Memory(
        capacity=_capacity(accelerator),
        parameters=parameters,
        optimizer_state=optimizer_state,
        gradients=parameters,
        batch=batch,
        saved=tuple(saved),
        counted=counted,
        needed=needed,
        largest=tuple(
            dataclasses.replace(part, advice=advice(part, step.experiment, arrays))
            for part in largest(parts, 3)
        ),
        largest_arrays=arrays,
        remarks=tuple(_remarks(accelerator, needed)),
    )


def _counted(compiled: jax.stages.Compiled, accelerator: Accelerator) -> Counted:
    found = compiled.memory_analysis()
    assert found is not None
    return Counted(
        arguments=found.argument_size_in_bytes,
        outputs=found.output_size_in_bytes - found.alias_size_in_bytes,
        temporaries=found.temp_size_in_bytes,
        program=found.generated_code_size_in_bytes,
        # On CPUs XLA leaves the temporaries out of it.
        peak=None if accelerator.platform == "cpu" else found.peak_memory_in_bytes,
        on_host=found.host_temp_size_in_bytes,
    )


def _capacity(accelerator: Accelerator) -> int | None:
    whole = accelerator.memory_bytes
    on_gpu = accelerator.platform in ("cuda", "rocm")
    return round(whole * _USABLE_ON_GPU) if whole and on_gpu else whole


def _remarks(accelerator: Accelerator, needed: int) -> Iterable[str]:
    if accelerator.platform == "cpu":
        yield "The temporaries are those of the CPU's compiler; other compilers need fewer."
    if accelerator.platform in ("cuda", "rocm"):
        assert accelerator.memory_bytes is not None
        yield (
            f"Of {size_text(accelerator.memory_bytes)} on the card, {_USABLE_ON_GPU:.0%} count as "
            "usable; the driver, NCCL and cuDNN have the rest."
        )
        share = needed / accelerator.memory_bytes
        if _TAKEN_BY_JAX < share <= _USABLE_ON_GPU:
            yield (
                f"JAX takes {_TAKEN_BY_JAX:.0%} of it unless told otherwise: set "
                f"XLA_PYTHON_CLIENT_MEM_FRACTION={_USABLE_ON_GPU}"
            )
