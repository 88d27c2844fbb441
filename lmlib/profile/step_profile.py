"""Time of a step by scope and kernel, compared with the roofline.

    with jax.profiler.trace(folder):
        state, metrics = compiled(state, batch)
        jax.block_until_ready(metrics)
    executions = read_trace(newest_trace(folder), jax.default_backend())
    scopes = scopes_of(state.whole_model)
    print(step_profile(executions, compiled.as_text(), steps=1, scopes=scopes))

docs/performance.md explains how to read the result.
"""

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from lmlib.hardware.specifications import Accelerator
from lmlib.plan.flops import Matmul
from lmlib.plan.program import read_program
from lmlib.plan.scopes import OTHER, PHASES
from lmlib.plan.step_time import ScopeTime, compute_time
from lmlib.plan.traffic import traffic
from lmlib.profile.kernels import Work, works
from lmlib.profile.trace import GRAPH, Execution, TraceError
from lmlib.terminal.table import columns

COLLECTIVES = "collectives"
SHOWN = 20  # rows of kernels


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One instruction of a step on one device, averaged over the devices and steps of a trace.

    Args:
      work: of one execution.
      times: executions per step.
      seconds: total time of these executions.
    """

    work: Work
    times: float
    seconds: float

    def seconds_at_best(self, accelerator: Accelerator) -> float | None:
        each = self.work.seconds_at_best(accelerator)
        return None if each is None else each * self.times


@dataclasses.dataclass(frozen=True)
class StepProfile:
    """The time of one step on one device; `str()` formats it as tables.

    `kernels` has the slowest first. `step_seconds` is a mean over `steps` and `devices`; at
    least one kernel ran during `busy_seconds` of it. `expected` is the estimate of `runner.plan`
    without collectives; `None` if unknown.
    """

    kernels: tuple[Kernel, ...]
    scopes: tuple[str, ...]
    steps: int
    devices: int
    step_seconds: float
    busy_seconds: float
    accelerator: Accelerator | None
    expected: tuple[ScopeTime, ...] | None

    def __str__(self) -> str:
        return self.text(every_kernel=False)

    @property
    def alike(self) -> tuple[tuple[int, Kernel], ...]:
        """Groups of kernels with the same work, scope and phase, as in unrolled layers.

        Each entry is the number of kernels and their sum as one kernel; the slowest first.
        """
        groups: dict[Work, list[Kernel]] = {}
        for one in self.kernels:
            kind = dataclasses.replace(one.work, name="", calls=frozenset())
            groups.setdefault(kind, []).append(one)
        together = []
        for group in groups.values():
            sums = (math.fsum(getattr(one, name) for one in group) for name in ("times", "seconds"))
            together.append((len(group), Kernel(group[0].work, *sums)))
        return tuple(sorted(together, key=lambda counted: -counted[1].seconds))

    def text(self, every_kernel: bool) -> str:
        """Formats the profile with every kernel, or with only the slowest groups of `alike`."""
        kernels = [(1, one) for one in self.kernels] if every_kernel else self.alike[:SHOWN]
        plural = "s" * (self.devices > 1)
        idle = 1 - self.busy_seconds / self.step_seconds
        return "\n".join(
            [
                f"a step of {self.step_seconds * 1e3:,.2f} ms on each device, mean of {self.steps} "
                f"on {self.devices} device{plural}; no kernel ran for {idle:.1%} of it",
                "",
                columns(self._scopes()),
                "",
                columns(self._table(kernels)),
            ]
        )

    def _scopes(self) -> list[list[str]]:
        measured: dict[tuple[str, str, bool], float] = {}
        for one in self.kernels:
            work = one.work
            key = (work.scope, work.phase, work.in_layers)
            key = (COLLECTIVES, "", False) if work.sends else key
            measured[key] = measured.get(key, 0.0) + one.seconds
        expected = {
            (one.scope, one.phase, one.in_layers): one.seconds for one in self.expected or ()
        }
        together = math.fsum(measured.values())
        rows = [["scope", "phase", "in", "ms", "share"]]
        rows[0] += ["plan's ms", "÷ plan's"] if expected else []
        order = [
            (phase, name) for phase in (*PHASES, "") for name in (*self.scopes, OTHER, COLLECTIVES)
        ]
        for key in sorted(measured, key=lambda key: order.index((key[1], key[0]))):
            name, phase, in_layers = key
            row = [name, phase, "layers" if in_layers else "step" if phase else ""]
            row += [f"{measured[key] * 1e3:,.2f}", f"{measured[key] / together:.1%}"]
            rows.append(row + (_beside(measured[key], expected.get(key)) if expected else []))
        return rows

    def _table(self, kernels: Iterable[tuple[int, Kernel]]) -> list[list[str]]:
        rows = [["kernel", "of", "scope", "phase", "times", "ms", "MB", "GFLOP"]]
        rows[0] += ["at best", "÷ best"] if self.accelerator else []
        for count, one in kernels:
            work = one.work
            name = work.name if count == 1 else f"{work.name} and {count - 1:,} alike"
            row = [name, work.operation, work.scope, work.phase, f"{one.times:,.0f}"]
            row += [f"{one.seconds * 1e3:,.3f}", f"{work.bytes * one.times / 1e6:,.1f}"]
            row.append("" if work.flops is None else f"{work.flops * one.times / 1e9:,.1f}")
            if self.accelerator:
                row += _beside(one.seconds, one.seconds_at_best(self.accelerator))
            rows.append(row)
        return rows


def step_profile(
    executions: Iterable[Execution],
    program_text: str,
    steps: int,
    scopes: Sequence[str] = (),
    accelerator: Accelerator | None = None,
    matmuls: Sequence[Matmul] | None = None,
) -> StepProfile:
    """Aggregates a trace that has `steps` complete steps of the program with this text.

    Executions of other programs are ignored. `matmuls` of the traced step
    (`lmlib.plan.flops.count_flops`) give the estimate of `runner.plan`. Raises TraceError if the
    trace has no instruction of the program.
    """
    program = read_program(program_text)
    heading = re.match(r"HloModule ([\w.\-]+)", program_text)
    name = heading[1] if heading else ""
    known, executions = works(program, scopes), list(executions)
    own = [
        one
        for one in executions
        if one.instruction in known and (not one.program or not name or one.program == name)
    ]
    if any(one.instruction.startswith(GRAPH) and one.program == name for one in executions):
        raise TraceError(
            "the GPU's kernels were launched as graphs, which lack the names of instructions: "
            "trace again with XLA_FLAGS=--xla_gpu_enable_command_buffer="
        )
    if not own:
        raise TraceError("the trace has no execution of the step's instructions")
    seen = {one.instruction for one in own}
    # A loop's time includes the instructions that it calls: drop it if these are traced themselves.
    own = [one for one in own if not known[one.instruction].calls & seen]
    devices = sorted({one.device for one in own})
    spans = [_span([one for one in own if one.device == device]) for device in devices]
    runs = steps * len(devices)
    totals: dict[str, tuple[int, float]] = {}
    own.sort(key=lambda one: (one.device, one.start))
    for (_, name), group in itertools.groupby(own, key=lambda one: (one.device, one.instruction)):
        together = list(group)  # consecutive executions
        times, seconds = totals.get(name, (0, 0.0))
        # An instruction was executed as often as its rarest kernel.
        times += min(Counter(one.kernel for one in together).values())
        totals[name] = times, seconds + math.fsum(one.seconds for one in together)
    kernels = [
        Kernel(known[name], times / runs, seconds / runs)
        for name, (times, seconds) in totals.items()
    ]
    expected = None
    if accelerator is not None and accelerator.memory_bandwidth is None:
        accelerator = None
    elif accelerator is not None and matmuls is not None:
        expected = compute_time(matmuls, traffic(program, scopes), accelerator, scopes)
    return StepProfile(
        kernels=tuple(sorted(kernels, key=lambda one: -one.seconds)),
        scopes=tuple(scopes),
        steps=steps,
        devices=len(devices),
        step_seconds=math.fsum(whole for whole, _ in spans) / runs,
        busy_seconds=math.fsum(busy for _, busy in spans) / runs,
        accelerator=accelerator,
        expected=expected,
    )


def _span(executions: Sequence[Execution]) -> tuple[float, float]:
    """Returns the seconds from the first start to the last end, and the busy seconds in between."""
    ordered = sorted(executions, key=lambda one: one.start)
    ends = list(itertools.accumulate((one.end for one in ordered), max))
    idle = math.fsum(max(0.0, one.start - end) for one, end in zip(ordered[1:], ends, strict=False))
    whole = ends[-1] - ordered[0].start
    return whole, whole - idle


def _beside(seconds: float, bound: float | None) -> list[str]:
    if not bound:
        return ["", ""]
    return [f"{bound * 1e3:,.3f}", f"{seconds / bound:.2f}"]
