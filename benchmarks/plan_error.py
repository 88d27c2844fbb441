"""Errors of lmlib.plan: steps that an H200 ran, and memory that XLA counts at other shapes.

    python benchmarks/plan_error.py --parts=steps                   # hours on two cores
    python benchmarks/plan_error.py --parts=steps --steps=84m,1b
    python benchmarks/plan_error.py --parts=memory --shapes=0,1,10

`steps`: the steps of benchmarks/train_step.py that docs/gpus.md lists, planned for one H200 with
the code of today, beside their measured times and peaks if there are any. Needs cuDNN
(pip install nvidia-cudnn-cu12).

`memory`: a plan's peak is the compiler's. Its list of state and batch comes from shapes and
layouts, and is compared with XLA's arguments; the peak is compared with the buffers that XLA lays
out, which also hold the gaps between arrays, on TPUs twice. No shape was used to make or tune the
plan.
"""

import dataclasses
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from absl import app, flags, logging
from step_peers.lmlib_step import make_optimizer
from step_peers.work import SIZES, Work

from lmlib.compute import EVERYTHING
from lmlib.data.synthetic import Synthetic
from lmlib.experiment import Experiment
from lmlib.parallel.mesh import make_mesh
from lmlib.plan import targets
from lmlib.plan.planner import Report, plan
from lmlib.terminal.table import columns
from runner.aot.abstract_inputs import built, without_data
from runner.config.configs import load
from runner.jax_settings.xla_flags import set_gpu_flags

PARTS = "steps", "memory"


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of benchmarks/train_step.py, with its time in ms and its peak in GB if measured.

    `rows` are the batch and the tokens of a row, if not the size's own.
    """

    size: str
    milliseconds: float | None = None
    gigabytes: float | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rows: tuple[int, int] | None = None
    packed: bool = False
    muon: bool = False


_FLOAT8 = {"quantized": {"mlp": "float8", "projections": "float8"}}
STEPS = {
    "84m": Step("84m", 83.6, 22.4),
    "270m": Step("270m", 238.2),
    "540m": Step("540m", 424.0),
    "1b": Step("1b", 680.1, 89.4),
    "2b": Step("2b", 1_300.8),
    "84m_mask": Step("84m", 93.6, settings={"attention": "cudnn"}, packed=True),
    "84m_triton": Step("84m", 86.2, settings={"attention": "triton"}),
    "84m_packed": Step("84m", 80.8, packed=True),
    "84m_scanned": Step("84m", 113.0, settings={"attention": "cudnn", "unroll": 1}, packed=True),
    "1b_mask": Step("1b", 690.8, settings={"attention": "cudnn"}, packed=True),
    "1b_triton": Step("1b", 686.4, settings={"attention": "triton"}),
    "84m_muon": Step("84m", muon=True),
    "270m_muon": Step("270m", muon=True),
    "1b_float8": Step("1b", settings=_FLOAT8),
    "2b_float8": Step("2b", settings=_FLOAT8),
    "hybrid_1b": Step("hybrid_1b"),
    "8x2048": Step("8x2048"),
    "8x2816": Step("8x2816"),
    "1b_8192": Step("1b", rows=(8, 8_192)),
    "1b_32768": Step("1b", rows=(2, 32_768)),
}

_DENSE, _MIXTURE = "experiments/llama_84m", "experiments/mixtral_8x7b"


def _shape(target: str, experiment: str, rows: int, tokens: int, **settings: Any) -> Any:
    sizes = {"data.batch_size": rows, "data.sequence_length": tokens}
    names = {"saved": "compute.saved", "fsdp": "mesh.fsdp", "tensor": "mesh.tensor"}
    names |= {"expert": "mesh.expert", "microbatches": "microbatches"}
    given = {names.get(name, f"model.{name}"): value for name, value in settings.items()}
    return target, experiment, sizes | given


def _dense(target: str, rows: int, tokens: int, vocab: int, *sizes: int, **more: Any) -> Any:
    given = dict(zip(("embed", "layers", "heads", "head_dim", "mlp"), sizes, strict=True))
    return _shape(target, _DENSE, rows, tokens, vocab=vocab, **given, **more)


def _mixture(target: str, rows: int, tokens: int, vocab: int, *sizes: int, **more: Any) -> Any:
    names = "embed", "layers", "heads", "kv_heads", "head_dim", "mlp", "experts", "top"
    given = dict(zip(names, sizes, strict=True))
    return _shape(target, _MIXTURE, rows, tokens, vocab=vocab, **given, **{"expert": 1} | more)


SHAPES = (
    _dense("h200:1x1", 8, 512, 10_240, 384, 3, 6, 64, 1_536),
    _dense("h200:1x1", 16, 1_024, 24_576, 640, 2, 10, 64, 2_560, saved=EVERYTHING),
    _dense("h200:1x8", 32, 512, 16_384, 512, 4, 8, 64, 1_792),
    _dense("h200:1x8", 16, 2_048, 32_000, 768, 3, 6, 128, 2_048, tensor=2),
    _dense("h100:1x4", 8, 1_024, 50_304, 896, 2, 7, 128, 3_584, microbatches=2),
    _dense("v5e:2x2", 8, 512, 12_288, 512, 3, 4, 128, 1_536),
    _dense("v5e:2x4", 16, 1_024, 32_000, 768, 2, 6, 128, 3_072, saved=EVERYTHING),
    _dense("v5e:2x4", 32, 512, 20_480, 640, 4, 4, 128, 2_560, tensor=2),
    _dense("v5p:2x2x1", 16, 2_048, 16_384, 1_024, 2, 8, 128, 2_816),
    _dense("v6e:2x2", 8, 1_024, 49_152, 896, 3, 7, 128, 2_304, microbatches=2),
    _mixture("h200:1x1", 8, 512, 10_240, 384, 2, 6, 2, 64, 512, 4, 2),
    _mixture("h200:1x1", 16, 512, 24_576, 512, 2, 8, 4, 64, 640, 8, 2, saved=EVERYTHING),
    _mixture("h200:1x4", 16, 512, 16_384, 640, 2, 10, 2, 64, 384, 16, 4, expert=4),
    _mixture("h200:1x8", 32, 512, 32_000, 512, 3, 4, 2, 128, 768, 8, 3, expert=4),
    _mixture("h100:1x4", 8, 1_024, 50_304, 768, 2, 6, 3, 128, 512, 8, 2, expert=2),
    _mixture("v5e:2x2", 8, 512, 12_288, 512, 2, 4, 2, 128, 512, 8, 2, expert=4),
    _mixture("v5e:2x4", 16, 512, 32_000, 640, 2, 5, 1, 128, 384, 16, 4, expert=8),
    _mixture("v5e:2x4", 16, 1_024, 20_480, 768, 2, 6, 2, 128, 640, 4, 2, expert=2),
    _mixture("v5p:2x2x1", 8, 1_024, 16_384, 512, 3, 4, 4, 128, 768, 8, 2, saved=EVERYTHING),
    _mixture("v6e:2x2", 8, 512, 49_152, 640, 2, 5, 5, 128, 512, 16, 2, expert=4),
)

_PARTS = flags.DEFINE_list("parts", list(PARTS), f"Parts: {', '.join(PARTS)}.")
_STEPS = flags.DEFINE_list("steps", list(STEPS), f"Steps: {', '.join(STEPS)}.")
_SHAPES = flags.DEFINE_list("shapes", [*map(str, range(len(SHAPES)))], "Numbers of shapes, from 0.")


def planned_step(step: Step) -> Report:
    """Returns the plan of a step for one H200."""
    targets.prepare(target := targets.parse("h200:1x1"))
    set_gpu_flags()
    size = dataclasses.replace(SIZES[step.size], changes=step.settings)
    if step.rows is not None:
        size = dataclasses.replace(size, batch=step.rows[0], sequence=step.rows[1])
    work = Work(size, "bfloat16", 1, step.packed, step.muon)
    data = Synthetic(size.settings["vocab"], size.batch, size.sequence)
    data.whole_rows = not step.packed
    experiment = Experiment(
        model=size.model,
        data=data,
        optimizer=lambda steps: make_optimizer(work),
        mesh=make_mesh(devices=target.devices()),
        steps=work.steps,
        compute=size.compute(work.precision),
    )
    report = plan(experiment, target)
    if any("cuDNN is not installed" in remark for remark in report.remarks):
        sys.exit("cuDNN is not installed: pip install nvidia-cudnn-cu12")
    return report


def steps(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yields a row for each step: planned times and peaks, and their errors if measured."""
    of_time, of_memory = [], []
    yield (
        "step", "kernels", "MFU, causal", "planned, ms", "ms", "error", "planned peak, GB", "GB",
        "error",
    )  # fmt: skip
    for name in names:
        step, report = STEPS[name], planned_step(STEPS[name])
        gigabytes = report.memory.needed / 1e9
        if report.estimate is None or report.kernels is None:
            yield name, "does not fit", "", "", "", "", f"{gigabytes:,.2f}", "", ""
            continue
        milliseconds = report.estimate.step_seconds * 1e3
        row = [name, f"{report.kernels.number:,}", f"{report.estimate.mfu_causal:.1%}"]
        row += _beside(milliseconds, step.milliseconds, ",.1f", ".1%", of_time)
        yield *row, *_beside(gigabytes, step.gigabytes, ",.2f", ".2%", of_memory)
    for label, of_all in (("median", _median), ("worst", _worst)):
        yield label, *[""] * 4, of_all(of_time, ".1%"), "", "", of_all(of_memory, ".2%")


def _beside(
    planned: float, measured: float | None, digits: str, of_error: str, errors: list[float]
) -> list[str]:
    """Returns both as texts, with the error of the plan, which is added to `errors`."""
    if measured is None:
        return [format(planned, digits), "", ""]
    errors.append(planned / measured - 1)
    return [format(planned, digits), format(measured, digits), format(errors[-1], f"+{of_error}")]


def planned_shape(number: int) -> Report:
    """Returns the plan of a shape of `SHAPES`."""
    target_name, experiment, settings = SHAPES[number]
    targets.prepare(target := targets.parse(target_name))
    set_gpu_flags()
    overrides = [f"{name}={value!r}" for name, value in settings.items()]
    return plan(built(without_data(load(experiment, [], overrides)), target.devices()), target)


def memory(numbers: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yields a row for each shape: listed state and batch beside XLA's, and the peak's buffers."""
    of_state, of_peak = [], []
    yield "shape", "target", "state, MB", "XLA's", "error", "peak", "buffers", "error"
    for number in map(int, numbers):
        target, experiment, _ = SHAPES[number]
        found = planned_shape(number).memory
        counted = found.counted
        assert counted is not None, "it does not fit"
        state = found.parameters + found.optimizer_state + found.batch
        buffers = counted.arguments + counted.outputs + counted.temporaries + counted.program
        of_state.append(state / counted.arguments - 1)
        of_peak.append(found.needed / buffers - 1)
        sizes = (state, counted.arguments, found.needed, buffers)
        listed, arguments, needed, together = (f"{size / 1e6:,.2f}" for size in sizes)
        label = f"{number} {'mixture' if experiment == _MIXTURE else 'dense'}"
        yield (
            label, target, listed, arguments, f"{of_state[-1]:+.3%}", needed, together,
            f"{of_peak[-1]:+.2%}",
        )  # fmt: skip
    yield "median", "", "", "", _median(of_state, ".3%"), "", "", _median(of_peak, ".2%")
    yield "worst", "", "", "", _worst(of_state, ".3%"), "", "", _worst(of_peak, ".2%")


def _median(errors: Sequence[float], digits: str) -> str:
    return format(statistics.median(map(abs, errors)), digits) if errors else ""


def _worst(errors: Sequence[float], digits: str) -> str:
    return format(max(map(abs, errors)), digits) if errors else ""


def _chosen(flag: flags.FlagHolder, known: Sequence[str]) -> list[str]:
    if unknown := {*flag.value} - {*known}:
        sys.exit(f"--{flag.name}={unknown.pop()} is not known; choose from {', '.join(known)}")
    return flag.value


def main(arguments: Sequence[str]) -> None:
    if arguments[1:]:
        sys.exit(f"unknown argument {arguments[1]!r}; options begin with --, see --help")
    parts = _chosen(_PARTS, PARTS)
    names, shapes = _chosen(_STEPS, [*STEPS]), _chosen(_SHAPES, [*map(str, range(len(SHAPES)))])
    logging.set_verbosity(logging.WARNING)
    for name, rows in (("steps", steps(names)), ("memory", memory(shapes))):
        if name in parts:
            found = []
            for row in rows:
                print(" ".join(row), file=sys.stderr, flush=True)  # a plan takes minutes
                found.append(row)
            print(f"\n{columns(found)}", flush=True)


if __name__ == "__main__":
    app.run(main)
