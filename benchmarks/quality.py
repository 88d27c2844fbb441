"""Quality from the same CPU-seconds: the quickstart, beside a plain GPT in compiled PyTorch.

    python benchmarks/quality.py                                     # three seeds of each
    python benchmarks/quality.py --fiddler=tiny --seeds=1 --rates=4e-3   # a look

Both read the same text as the same tokens, and are judged by the bits per byte of the same whole
validation text. lmlib makes the quickstart's steps, in so many CPU-seconds of all threads. The GPT
(quality_peer/gpt.py: learned positions, LayerNorm, GELU, one table for input and output, AdamW)
makes steps of the same batches until it has spent as many, with a rate that is warmed up and
decayed by what was spent. Starting, compiling and evaluating count for neither. The GPT has the
quickstart's width, layers and heads; its peak rate is the best of --rates at the first seed. The
last line is the mean difference over pairs of one seed, with its standard error.
"""

import importlib.util
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

from absl import app, flags, logging

# See benchmarks/train_step.py: waiting threads of OpenMP count as CPU time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import jax
from quality_peer.trained import Progress, Trained

from lmlib.data.batch import place
from lmlib.data.flat_tokens import FlatTokens
from lmlib.evaluate.validation import Evaluator, bits_per_byte
from lmlib.experiment import Experiment
from lmlib.parallel.layout import sharding
from lmlib.terminal.table import columns
from runner.absent_hardware.stand_ins import built
from runner.config import configs
from runner.jax_settings.allocator import keep_freed_memory

_FIDDLERS = flags.DEFINE_multi_string("fiddler", [], "of the quickstart; repeatable")
_STEPS = flags.DEFINE_integer("steps", None, "of the quickstart, instead of its own", lower_bound=2)
_SEEDS = flags.DEFINE_integer("seeds", 3, "runs of each", lower_bound=1)
_RATES = flags.DEFINE_list("rates", ["1e-3", "2e-3", "4e-3"], "peak learning rates of the GPT")

Pair = tuple[Trained, Trained]  # lmlib, the GPT


def train_lmlib(experiment: Experiment, validation: FlatTokens, seed: int) -> Trained:
    """Makes all steps of the experiment, then evaluates."""
    step = experiment.trace_step().lower().compile()
    state = experiment.initial_state()
    rows = sharding("batch seq", experiment.mesh)
    progress = Progress(f"seed {seed}: lmlib")
    begun = time.process_time()
    for number in range(experiment.steps):
        batch = place(experiment.data, number, rows)
        state, _ = step(state, batch, experiment.training.hyperparameters)
        progress.tell((number + 1) / experiment.steps, number + 1)
    jax.block_until_ready(state)
    spent = time.process_time() - begun
    evaluate = Evaluator(experiment.mesh, experiment.compute, experiment.objective)
    assert validation.batches is not None and validation.bytes_per_target is not None
    found = evaluate(state.whole_model, validation, validation.batches)
    return Trained(
        bits_per_byte=bits_per_byte(found.loss, validation.bytes_per_target),
        steps=experiment.steps,
        cpu_seconds=spent,
        parameters=sum(weight.size for weight in jax.tree.leaves(state.whole_model)),
    )


def pairs(rates: Sequence[float]) -> Iterator[Pair]:
    """Each seed's; stderr says what each run gave. The first seed keeps the best of `rates`."""
    from quality_peer.gpt import Shape, train_gpt

    for seed in range(_SEEDS.value):
        changes = [f"seed={seed}", f"data.seed={seed}"]
        changes += [] if _STEPS.value is None else [f"steps={_STEPS.value}"]
        cfg = configs.load("experiments/quickstart", _FIDDLERS.value, changes)
        size, experiment = cfg.model, built(cfg, jax.devices())
        data, (validation,) = experiment.data, experiment.validation_sets.values()
        shape = Shape(size.vocab, size.embed, size.layers, size.heads, data.sequence_length)

        ours = train_lmlib(experiment, validation, seed)
        print(f"seed {seed}: lmlib: {ours}", file=sys.stderr, flush=True)
        found = {}
        for rate in rates:
            found[rate] = train_gpt(shape, data, validation, ours.cpu_seconds, rate, seed)
            print(f"seed {seed}: GPT at {rate:g}: {found[rate]}", file=sys.stderr, flush=True)
        rates = [min(found, key=lambda rate: found[rate].bits_per_byte)]
        yield ours, found[rates[0]]


def main(arguments: Sequence[str]) -> None:
    if arguments[1:]:
        sys.exit(f"what is {arguments[1]!r}? Options begin with --; see --help")
    if importlib.util.find_spec("torch") is None:
        sys.exit("the GPT needs PyTorch: pip install torch")
    keep_freed_memory()  # as in a run: for both
    logging.set_verbosity(logging.WARNING)  # not what JAX looked for and did not find
    jax.config.update("jax_platforms", "cpu")
    found = list(pairs([float(rate) for rate in _RATES.value]))
    rows = [("bits per byte", *(f"seed {seed}" for seed in range(len(found))), "CPU-s", "weights")]
    for name, runs in zip(("lmlib", "GPT"), zip(*found, strict=True), strict=True):
        bits = (f"{run.bits_per_byte:.4f}" for run in runs)
        seconds = statistics.mean(run.cpu_seconds for run in runs)
        rows.append((name, *bits, f"{seconds:.1f}", f"{runs[0].parameters:,}"))
    print(columns(rows))
    differences = [ours.bits_per_byte - theirs.bits_per_byte for ours, theirs in found]
    error = statistics.stdev(differences) / math.sqrt(len(found)) if len(found) > 1 else math.nan
    print(f"lmlib - GPT: {statistics.mean(differences):+.4f} ± {error:.4f} bits per byte")


if __name__ == "__main__":
    app.run(main)
