"""Quality for the same CPU-seconds: the quickstart against a plain GPT in compiled PyTorch.

    python benchmarks/quality.py                                     # three seeds of each
    python benchmarks/quality.py --fiddler=tiny --seeds=1 --rates=4e-3   # a look

Both read the same batches, and are evaluated in bits per byte on the full validation text. The GPT
is transformers' GPT-2 (learned positions, LayerNorm, GELU, tied embeddings) with the quickstart's
width, layers and heads, and AdamW. It trains until it has spent the CPU-seconds of lmlib's steps,
which also determine its schedule; start-up, compilation and evaluation count for neither. The last
line is the mean difference over pairs with the same seed, with its standard error.

Shapes: B batch, S sequence, V vocab.
"""

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from absl import app, flags, logging

# See benchmarks/train_step.py: waiting OpenMP threads count as CPU time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import jax
import numpy as np

try:
    import torch
    import transformers
except ImportError:
    sys.exit("the GPT needs PyTorch and transformers: pip install torch transformers")
from step_peers.pytorch_peer import fused_adamw
from step_peers.work import AdamW
from torch import Tensor, nn
from torch.nn import functional

from lmlib.data.batch import Batch, place
from lmlib.data.flat_tokens import FlatTokens
from lmlib.evaluate.validation import Evaluator, bits_per_byte
from lmlib.experiment import Experiment
from lmlib.parallel.layout import sharding
from lmlib.terminal.table import columns
from runner.aot.abstract_inputs import built
from runner.config import configs
from runner.jax_settings.devices import keep_freed_memory

_FIDDLERS = flags.DEFINE_multi_string("fiddler", [], "Fiddler of the quickstart; repeatable.")
_STEPS = flags.DEFINE_integer(
    "steps", None, "Steps of the quickstart, instead of its own.", lower_bound=2
)
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each.", lower_bound=1)
_RATES = flags.DEFINE_list("rates", ["1e-3", "2e-3", "4e-3"], "Peak learning rates of the GPT.")

ADAMW = AdamW()
WARMUP, END = 0.05, 0.1  # fraction of the budget, and of the peak rate
_NO_TARGET = -100  # ignored by PyTorch's loss


class GPT(nn.Module):
    """A GPT that maps tokens and targets to the sum of the losses, in nats."""

    def __init__(self, vocab: int, embed: int, layers: int, heads: int, sequence: int):
        super().__init__()
        sizes = dict(vocab_size=vocab, n_positions=sequence, n_embd=embed, n_layer=layers)
        no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        no_ids = {"bos_token_id": None, "eos_token_id": None}
        config = transformers.GPT2Config(
            **sizes, n_head=heads, activation_function="gelu", **no_dropout, **no_ids
        )
        self.model = transformers.GPT2LMHeadModel(config)

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        logits_BSV = self.model(input_ids=tokens_BS, use_cache=False).logits
        return functional.cross_entropy(
            logits_BSV.flatten(0, 1), targets_BS.flatten(), ignore_index=_NO_TARGET, reduction="sum"
        )


class Trained(NamedTuple):
    """A training result: bits per byte of all validation text, and CPU-seconds of the steps."""

    bits_per_byte: float
    steps: int
    cpu_seconds: float
    parameters: int

    def __str__(self) -> str:
        return (
            f"{self.bits_per_byte:.4f} bits per byte after {self.steps:,} steps of "
            f"{self.cpu_seconds / self.steps:.3f} CPU-seconds, {self.parameters:,} weights"
        )


def train_lmlib(experiment: Experiment, validation: FlatTokens) -> Trained:
    """Trains all steps of the experiment, then evaluates."""
    step = experiment.trace_step().lower().compile()
    state = experiment.initial_state()
    rows = sharding("batch seq", experiment.mesh)
    begun = time.process_time()
    for number in range(experiment.steps):
        batch = place(experiment.data, number, rows)
        state, _ = step(state, batch, experiment.training.hyperparameters)
    jax.block_until_ready(state)
    spent = time.process_time() - begun
    evaluate = Evaluator(experiment.mesh, experiment.compute, experiment.objective)
    found = evaluate(state.whole_model, validation, validation.batches)
    bits = bits_per_byte(found.loss, validation.bytes_per_target)
    weights = jax.tree.leaves(state.whole_model)
    return Trained(bits, experiment.steps, spent, sum(weight.size for weight in weights))


def train_gpt(
    model: GPT, data: FlatTokens, validation: FlatTokens, cpu_seconds: float, peak_lr: float
) -> Trained:
    """Trains until `cpu_seconds` of all threads are spent, then evaluates."""
    loss_of = torch.compile(model, fullgraph=True, dynamic=False)
    optimizer = fused_adamw(list(model.parameters()), ADAMW)
    loss_of(*tensors(data.batch(0))[:2]).backward()  # compiles
    optimizer.zero_grad(set_to_none=True)
    begun, spent, step = time.process_time(), 0.0, 0
    while spent < cpu_seconds:
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * rate_at(spent / cpu_seconds)
        tokens_BS, targets_BS, count = tensors(data.batch(step))
        (loss_of(tokens_BS, targets_BS) / max(count, 1)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), ADAMW.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, spent = step + 1, time.process_time() - begun
    bits = bits_per_byte(nats(loss_of, validation), validation.bytes_per_target)
    return Trained(bits, step, spent, sum(weight.numel() for weight in model.parameters()))


def rate_at(share: float) -> float:
    """Returns the rate, relative to the peak, after a `share` of the budget."""
    if share < WARMUP:
        return (share + 0.001) / (WARMUP + 0.001)
    done = min(1.0, (share - WARMUP) / (1 - WARMUP))
    return END + (1 - END) * (1 + math.cos(math.pi * done)) / 2


@torch.no_grad()
def nats(loss_of: Callable[..., Tensor], validation: FlatTokens) -> float:
    """Returns the mean loss over the targets of the full split."""
    total, targets = 0.0, 0
    for number in range(validation.batches):
        tokens_BS, targets_BS, count = tensors(validation.batch(number))
        total += loss_of(tokens_BS, targets_BS).item()
        targets += count
    return total / targets


def tensors(batch: Batch) -> tuple[Tensor, Tensor, int]:
    """Returns tokens, targets and the number of targets that count."""
    targets_BS = np.where(batch.loss_mask, batch.targets, _NO_TARGET).astype(np.int64)
    tokens_BS = torch.from_numpy(np.asarray(batch.tokens, np.int64))
    return tokens_BS, torch.from_numpy(targets_BS), int(batch.loss_mask.sum())


def pairs(rates: Sequence[float]) -> Iterator[tuple[Trained, Trained]]:
    """Yields the results of lmlib and the GPT for each seed; the first seed finds the best rate."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    for seed in range(_SEEDS.value):
        changes = [f"seed={seed}", f"data.seed={seed}"]
        changes += [] if _STEPS.value is None else [f"steps={_STEPS.value}"]
        cfg = configs.load("experiments/quickstart", _FIDDLERS.value, changes)
        size, experiment = cfg.model, built(cfg, jax.devices())
        data, (validation,) = experiment.data, experiment.validation_sets.values()
        ours = train_lmlib(experiment, validation)
        print(f"seed {seed}: lmlib: {ours}", file=sys.stderr, flush=True)
        found = {}
        for rate in rates:
            torch.manual_seed(seed)
            model = GPT(size.vocab, size.embed, size.layers, size.heads, data.sequence_length)
            found[rate] = train_gpt(model, data, validation, ours.cpu_seconds, rate)
            print(f"seed {seed}: GPT at {rate:g}: {found[rate]}", file=sys.stderr, flush=True)
        rates = [min(found, key=lambda rate: found[rate].bits_per_byte)]
        yield ours, found[rates[0]]


def main(arguments: Sequence[str]) -> None:
    if arguments[1:]:
        sys.exit(f"unknown argument {arguments[1]!r}; options begin with --, see --help")
    keep_freed_memory()  # as in a run; applies to both
    logging.set_verbosity(logging.WARNING)  # hides JAX's messages about missing devices
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
