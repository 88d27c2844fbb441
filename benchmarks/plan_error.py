"""Errors of lmlib.plan: steps that an H200 ran, and memory that XLA counts at other shapes.

    python benchmarks/plan_error.py --parts=measured                # hours on two cores
    python benchmarks/plan_error.py --parts=measured --steps=84m,1b
    python benchmarks/plan_error.py --parts=memory --shapes=0,1,10

`measured`: the steps of docs/gpus.md, planned for one H200 with the code of today. Needs cuDNN
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

from lmlib.compute import EVERYTHING
from lmlib.data.synthetic import Synthetic
from lmlib.plan import targets
from lmlib.plan.planner import Report, plan
from lmlib.terminal.table import columns
from runner.aot.abstract_inputs import built, without_data
from runner.config.configs import load
from runner.jax_settings.xla_flags import set_gpu_flags

PARTS = "measured", "memory"


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of docs/gpus.md with `--fiddler=fast`, its time in ms, and its peak in GB if known."""

    size: str
    milliseconds: float
    gigabytes: float | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    whole_rows: bool = True


MEASURED = {
    "84m": Step("84m", 83.6, 22.4),
    "270m": Step("270m", 238.2),
    "540m": Step("540m", 424.0),
    "1b": Step("1b", 680.1, 89.4),
    "2b": Step("2b", 1_300.8),
    "84m_mask": Step("84m", 93.6, None, {"attention": "cudnn"}, False),
    "84m_triton": Step("84m", 86.2, None, {"attention": "triton"}),
    "84m_packed": Step("84m", 80.8, None, {}, False),
    "84m_scanned": Step("84m", 113.0, None, {"attention": "cudnn", "unroll": 1}, False),
    "1b_mask": Step("1b", 690.8, None, {"attention": "cudnn"}, False),
    "1b_triton": Step("1b", 686.4, None, {"attention": "triton"}),
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
_STEPS = flags.DEFINE_list("steps", list(MEASURED), f"Measured steps: {', '.join(MEASURED)}.")
_SHAPES = flags.DEFINE_list("shapes", [*map(str, range(len(SHAPES)))], "Numbers of shapes, from 0.")


def planned(experiment: str, target_name: str, overrides: Sequence[str], step: Any) -> Report:
    """The plan of an experiment with overrides, and the data and settings of a measured `step`."""
    targets.prepare(target := targets.parse(target_name))
    set_gpu_flags()
    fiddlers = ["fast"] if step else []
    cfg = without_data(load(experiment, fiddlers, overrides))
    made = built(cfg, target.devices())
    if step is not None:
        data = Synthetic(made.data.vocab_size, 64, 1_024)
        data.whole_rows = step.whole_rows
        compute = dataclasses.replace(made.compute, **step.settings)
        made = dataclasses.replace(made, data=data, compute=compute)
    report = plan(made, target)
    if any("cuDNN is not installed" in remark for remark in report.remarks):
        sys.exit("cuDNN is not installed: pip install nvidia-cudnn-cu12")
    return report


def measured(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """A row for each step: times and peaks, planned and measured, with errors."""
    of_time, of_memory = [], []
    yield "step", "ms", "planned", "error", "peak, GB", "planned", "error"
    for name in names:
        step = MEASURED[name]
        report = planned(f"experiments/llama_{step.size}", "h200:1x1", (), step)
        assert report.estimate is not None
        milliseconds, gigabytes = report.estimate.step_seconds * 1e3, report.memory.needed / 1e9
        of_time.append(milliseconds / step.milliseconds - 1)
        row = [name, f"{step.milliseconds:,.1f}", f"{milliseconds:,.1f}", f"{of_time[-1]:+.1%}"]
        if step.gigabytes is None:
            yield *row, "", f"{gigabytes:,.2f}", ""
            continue
        of_memory.append(gigabytes / step.gigabytes - 1)
        yield *row, f"{step.gigabytes}", f"{gigabytes:,.2f}", f"{of_memory[-1]:+.2%}"
    yield "median", "", "", _median(of_time, ".1%"), "", "", _median(of_memory, ".2%")
    yield "worst", "", "", _worst(of_time, ".1%"), "", "", _worst(of_memory, ".2%")


def memory(numbers: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """A row for each shape: listed state and batch against XLA's, and the peak against buffers."""
    of_state, of_peak = [], []
    yield "shape", "target", "state, MB", "XLA's", "error", "peak", "buffers", "error"
    for number in map(int, numbers):
        target, experiment, settings = SHAPES[number]
        overrides = [f"{name}={value!r}" for name, value in settings.items()]
        found = planned(experiment, target, overrides, None).memory
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
    steps, shapes = _chosen(_STEPS, [*MEASURED]), _chosen(_SHAPES, [*map(str, range(len(SHAPES)))])
    logging.set_verbosity(logging.WARNING)
    for name, rows in (("measured", measured(steps)), ("memory", memory(shapes))):
        if name in parts:
            found = []
            for row in rows:
                print(" ".join(row), file=sys.stderr, flush=True)  # a plan takes minutes
                found.append(row)
            print(f"\n{columns(found)}", flush=True)


if __name__ == "__main__":
    app.run(main)
