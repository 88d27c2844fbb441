"""Speed of a mixture's training step on a CPU, beside a dense model and beside transformers.

    python benchmarks/experts.py                 # some minutes
    python benchmarks/experts.py --sizes=8_of_512

- `mixture`: lmlib's Mixtral, each token through `top` of its experts;
- `dense`: lmlib's Llama whose mlp is as large as the experts of a token, so that both multiply each
  token by as many weights (but for the router);
- `transformers`, `transformers_grouped`: transformers' Mixtral with the same weights and batches,
  its experts one after another, or as grouped products. Its losses of the first 20 steps must be
  the mixture's (tolerance: step_peers/report.py).

They take turns as in benchmarks/train_step.py; the figure is tokens per CPU-second of all threads,
the median over turns. All keep freed memory as a run on CPUs does. float32, one document a row,
activations kept.
"""

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Sequence

from absl import app, flags, logging

# See benchmarks/train_step.py: waiting threads of OpenMP count as CPU time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import jax
from step_peers.contender import Contender, Work
from step_peers.lmlib_step import LmlibStep
from step_peers.machine import cpu_name, versions
from step_peers.measure import TURN, Measurement, in_turns, rate
from step_peers.report import CHECKED, OtherWork, check_same_work
from step_peers.sizes import Size

from lmlib.models.families.experts.mixtral import mixtral
from lmlib.models.families.llama import llama
from lmlib.terminal.table import columns
from runner.jax_settings.allocator import keep_freed_memory

_MODEL = {"vocab": 8_192, "embed": 256, "layers": 4, "heads": 4}
_TINY = {"vocab": 64, "embed": 32, "layers": 2, "heads": 2}


def _mixture(name: str, experts: int, top: int, mlp: int, **others: int) -> Size:
    settings = {**(others or _MODEL), "experts": experts, "top": top, "mlp": mlp}
    batch, sequence = (8, 64) if others else (8, 512)
    return Size(name, settings, batch, sequence, family=mixtral)


SIZES = {
    size.name: size
    for size in (
        _mixture("tiny", 4, 2, 32, **_TINY),
        _mixture("8_of_512", 8, 2, 512),
        _mixture("32_of_256", 32, 4, 256),
    )
}
TRANSFORMERS = {"transformers": "eager", "transformers_grouped": "grouped_mm"}

_SIZES = flags.DEFINE_list("sizes", ["8_of_512", "32_of_256"], f"Of {', '.join(SIZES)}.")
_STEPS = flags.DEFINE_integer(
    "steps", CHECKED, f"Of each contender, in turns of {TURN}.", lower_bound=2 * TURN
)


def dense_of(mixture: Size) -> Size:
    """The dense model whose mlp is what a token's experts are together."""
    settings = dict(mixture.settings)
    settings["mlp"] *= settings.pop("top")
    settings.pop("experts")
    return dataclasses.replace(mixture, settings=settings, family=llama)


def contenders(work: Work) -> dict[str, Contender]:
    """All that can run here."""
    found: dict[str, Contender] = {
        "mixture": LmlibStep(work),
        "dense": LmlibStep(dataclasses.replace(work, size=dense_of(work.size))),
    }
    if all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        from step_peers.transformers_mixture import TransformersMixture

        found |= {
            name: TransformersMixture(work, experts) for name, experts in TRANSFORMERS.items()
        }
    else:
        print("transformers: not installed (pip install 'lmlib[parity]')")
    return found


def title(size: Size) -> str:
    """What is measured."""
    settings = size.settings
    weights = jax.tree.leaves(jax.eval_shape(size.make_model))
    return (
        f"{size.name}: {sum(weight.size for weight in weights) / 1e6:,.1f} M parameters, each "
        f"token through {settings['top']} of {settings['experts']} experts (embed "
        f"{settings['embed']}, {settings['layers']} layers, mlp {settings['mlp']} each, vocab "
        f"{settings['vocab']}), {size.batch} × {size.sequence} tokens a step, float32"
    )


def table(size: Size, measurements: dict[str, Measurement]) -> str:
    """The speed of each, and the mixture's over it."""
    speeds = {name: rate(size.tokens, each.cpu_seconds) for name, each in measurements.items()}
    rows = [
        ["", "tokens per CPU-second", "slowest … fastest turn", "mixture ÷ it", "last loss"],
        *(
            [
                name,
                f"{speed.median:,.0f}",
                f"{speed.slowest:,.0f} … {speed.fastest:,.0f}",
                f"{speeds['mixture'].median / speed.median:.2f}",
                f"{measurements[name].losses[-1]:.5f}",
            ]
            for name, speed in speeds.items()
        ),
    ]
    return columns(rows)


def main(arguments: Sequence[str]) -> None:
    if arguments[1:]:
        sys.exit(f"what is {arguments[1]!r}? Options begin with --; see --help")
    unknown = [name for name in _SIZES.value if name not in SIZES]
    if unknown:
        sys.exit(f"--sizes={unknown[0]} is not known; choose from {', '.join(SIZES)}")
    if _STEPS.value % TURN:
        sys.exit(f"--steps={_STEPS.value} must be a multiple of {TURN}, the steps of a turn")
    logging.set_verbosity(logging.WARNING)
    keep_freed_memory()  # as the runner does on CPUs, for all contenders alike
    jax.config.update("jax_platforms", "cpu")
    print(f"{os.cpu_count()} × {cpu_name()}, {versions()}")
    for name in _SIZES.value:
        size = SIZES[name]
        print(f"\n{title(size)}", flush=True)
        measurements = in_turns(contenders(Work(size, "float32", _STEPS.value)), _STEPS.value)
        print(table(size, measurements), flush=True)
        for peer in TRANSFORMERS.keys() & measurements.keys():
            losses, expected = measurements[peer].losses, measurements["mixture"].losses
            try:
                check_same_work(peer, losses, expected, "float32")
            except OtherWork as error:
                sys.exit(str(error))


if __name__ == "__main__":
    app.run(main)
