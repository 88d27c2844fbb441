"""lmlib's step compiled for hardware that is absent: what it would need there, not how fast."""

import sys
from collections.abc import Iterator, Sequence

from lmlib.data.synthetic import Synthetic
from lmlib.experiment import Experiment
from lmlib.parallel.mesh import make_mesh
from lmlib.plan.planner import plan
from lmlib.plan.targets import Target, TargetError, parse, prepare
from step_peers.contender import Work
from step_peers.lmlib_step import make_optimizer


def target_of(text: str) -> Target:
    """ "h200" is one of them, "h200:1x8" a host with eight. Exits if there is no such thing."""
    try:
        target = parse(text if ":" in text else f"{text}:1x1")
        prepare(target)
        target.devices()
    except TargetError as error:
        sys.exit(f"--compile_only={text}: {error}")
    return target


class Rows(Synthetic):
    """What the step is told of the rows of `work`."""

    def __init__(self, work: Work):
        size = work.size
        super().__init__(size.settings["vocab"], size.batch, size.sequence)
        self.whole_rows = not work.packed


def compiled_for(target: Target, works: Sequence[Work]) -> Iterator[tuple[str, ...]]:
    """For each: its size, memory, kernels and seconds to compile; a row as soon as it is known."""
    mesh = make_mesh(fsdp=-1, devices=target.devices())
    for work in works:
        size = work.size
        experiment = Experiment(
            model=size.model,
            compute=size.compute(work.precision),
            data=Rows(work),
            optimizer=lambda steps, work=work: make_optimizer(work),
            mesh=mesh,
            steps=work.steps,
        )
        report = plan(experiment, target)
        launched = "" if report.kernels is None else str(report.kernels)
        seconds = f"compiled in {report.seconds:.0f} s"
        columns = size.name, report.memory.verdict, launched, *report.remarks, seconds
        yield tuple(filter(None, columns))
