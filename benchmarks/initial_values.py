"""Comparison of initialisation schemes over model sizes, learning rates and seeds.

    python benchmarks/initial_values.py [--widths=32,64,128] [--depths=2,6] [--seeds=3]

Trains small Llamas on the sources of Python's standard library, and prints the validation loss of
each scheme in nats per token: the mean over seeds at the better learning rate. Schemes differ in
the standard deviation of the initial weights:

    fan_in      every matrix by its fan-in, embedding embed^-1/2
    gpt2        0.02 everywhere, matrices that write to the residual stream / √(2 · layers)
    unit        by fan-in, embedding 1, matrices that write to the residual stream / √(2 · layers)
    unit_small  unit, with logits of standard deviation embed^-1/2 instead of 1
    quarter     unit, with an embedding of 1/4
    half        unit, with an embedding of 1/2
    half_small  half, with logits of standard deviation embed^-1/2
    unit_0.25, unit_0.3, unit_0.4   unit, with logits of that standard deviation
    unit_zero, half_zero            unit and half, with logits of zero

A tied table has the embedding's deviation; the last norm's scale sets the logits' deviation.

Results after 200 steps of 512 tokens: the mean over three seeds at the better of two rates. (The
standard deviation between seeds is 0.03, the median over all runs.) Logits have standard deviation
1 unless stated otherwise. `lmlib.models.families.transformer` uses the schemes recommended by these
results.

    embed, layers                   32, 2  32, 6  64, 2  64, 6  128, 2  128, 6
    all by fan-in, table embed^-½   4.927  5.134  4.876  5.061   4.712   4.911
    GPT-2's 0.02                    4.690  4.779  4.527  4.840   4.839   5.249
    table 1                         4.499  4.508  4.199  4.226   4.123   4.054
    table 1, logits embed^-½        4.462  4.488  4.221  4.370   4.135   4.100
    tied: all by fan-in             5.084  5.273  4.880  5.209   4.770
    tied: GPT-2's 0.02              5.490  5.623  5.268  5.635   4.938
    tied: table 1                   5.074  5.066  4.675  4.756   4.447   4.525
    tied: table 1, logits embed^-½  5.056  5.053  4.653  4.744   4.380   4.496
    tied: table 1/4                 4.755  4.827  4.488  4.666   4.452   4.463
    tied: table 1/2                 4.833  4.876  4.510  4.629   4.397   4.431
    table 1, logits 0.4                                  4.231           4.028
    table 1, logits 0.3                                  4.254           4.033
    table 1, logits 0.25                          4.182  4.275
    table 1, logits 0                             4.430  4.650
    tied: table 1/2, logits embed^-½              4.509  4.643
    tied: table 1/2, logits 0                     4.528  4.683

Smaller initial logits cost nothing down to about 0.35 with an untied head. An untied head of zeros
costs a lot, a tied one little. (The tied pair at 128, 6 was measured on another text: embed^-½ cost
0.007.)
"""

import functools
import itertools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from data_tools.standard_library import standard_library
from lmlib import train
from lmlib.compute import EVERYTHING, Compute
from lmlib.data.batch import place
from lmlib.data.flat_tokens import FlatTokens
from lmlib.evaluate.validation import Evaluator
from lmlib.models.decoder import Decoder
from lmlib.models.families.llama import llama
from lmlib.models.weights import Random
from lmlib.optim.adamw import adamw
from lmlib.parallel.axes import Weight, map_weights
from lmlib.parallel.layout import sharding
from lmlib.parallel.mesh import make_mesh
from lmlib.state import Training, abstract_batch, abstract_model, initial_state
from lmlib.terminal.table import columns
from runner.jax_settings.devices import choose_devices


class Scheme(NamedTuple):
    """Standard deviations, given the size `embed`."""

    embedding: Callable[[int], float]
    logits: Callable[[int], float]
    deep: bool  # residual writes / √(2 · layers)
    matrices: float | None = None  # of all matrices; None: by their fan-in


SCHEMES = {
    "fan_in": Scheme(lambda embed: embed**-0.5, lambda embed: 1.0, deep=False),
    "gpt2": Scheme(lambda embed: 0.02, lambda embed: 0.02 * embed**0.5, deep=True, matrices=0.02),
    "unit": Scheme(lambda embed: 1.0, lambda embed: 1.0, deep=True),
    "unit_small": Scheme(lambda embed: 1.0, lambda embed: embed**-0.5, deep=True),
    "quarter": Scheme(lambda embed: 0.25, lambda embed: 1.0, deep=True),
    "half": Scheme(lambda embed: 0.5, lambda embed: 1.0, deep=True),
    "half_small": Scheme(lambda embed: 0.5, lambda embed: embed**-0.5, deep=True),
    "half_zero": Scheme(lambda embed: 0.5, lambda embed: 0.0, deep=True),
    "unit_0.25": Scheme(lambda embed: 1.0, lambda embed: 0.25, deep=True),
    "unit_0.3": Scheme(lambda embed: 1.0, lambda embed: 0.3, deep=True),
    "unit_0.4": Scheme(lambda embed: 1.0, lambda embed: 0.4, deep=True),
    "unit_zero": Scheme(lambda embed: 1.0, lambda embed: 0.0, deep=True),
}

_WIDTHS = flags.DEFINE_list("widths", ["32", "64", "128"], "of the residual stream")
_DEPTHS = flags.DEFINE_list("depths", ["2", "6"], "layers")
_RATES = flags.DEFINE_list("rates", ["5e-3", "2e-2"], "peak learning rates")
_SCHEMES = flags.DEFINE_list("schemes", list(SCHEMES), "of those above")
_TIED = flags.DEFINE_list("tied", ["no", "yes"], "whether one table embeds and unembeds")
_SEEDS = flags.DEFINE_integer("seeds", 3, "runs of each", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 200, "of each run", lower_bound=1)
_OUT = flags.DEFINE_string("out", None, "a file for every run's loss, JSON")

_VOCAB, _BATCH, _SEQUENCE = 1_024, 8, 64


def scaled(model: Decoder, name: str) -> Decoder:
    """Returns `model` with initial values of the scheme `name`."""
    scheme, embed = SCHEMES[name], model.embedding.shape[1]
    layers = model.stack.patterns[0][0].mlp.down.shape[0]

    def deviation(weight: Weight, sizes: dict[str, int]) -> float:
        field = weight.path.rsplit(".", 1)[-1]
        if field == "embedding":
            return scheme.embedding(embed)
        if field == "unembedding":
            return scheme.logits(embed) * embed**-0.5
        first = weight.declaration.initial
        found = scheme.matrices or math.prod(sizes[axis] for axis in first.summed) ** -0.5
        return (
            found * (2 * layers) ** -0.5 if scheme.deep and field in ("output", "down") else found
        )

    def made(weight: Weight, array: jax.Array) -> jax.Array:
        first = weight.declaration.initial
        sizes = dict(zip(weight.axes, array.shape, strict=True))
        if isinstance(first, Random):
            return array * (deviation(weight, sizes) / first.deviation(sizes))
        if weight.path == "norm.scale" and model.unembedding is None:
            return jnp.full_like(
                array, scheme.logits(embed) / scheme.embedding(embed) * embed**-0.5
            )
        return jnp.ones_like(array)

    return map_weights(made, model)


def losses(width: int, depth: int, tied: bool, rate: float) -> dict[str, list[float]]:
    """Returns the validation loss of each scheme, for each seed."""
    path = standard_library(vocab_size=_VOCAB)
    of = functools.partial(FlatTokens, path, batch_size=_BATCH, sequence_length=_SEQUENCE)
    data, mesh, compute = of(split="train"), make_mesh(), Compute("float32", saved=EVERYTHING)
    evaluate, validation = Evaluator(mesh, compute), of(split="validation", seed=None, epochs=1)
    training = Training(adamw(_STEPS.value, rate), mesh, compute)
    make = functools.partial(llama, _VOCAB, width, depth, max(2, width // 32), 3 * width, tied=tied)
    rows = sharding("batch seq", mesh)
    step, found = None, {}
    batches = [place(data, i, rows) for i in range(_STEPS.value)]
    for scheme, seed in itertools.product(_SCHEMES.value, range(_SEEDS.value)):
        model = jax.jit(scaled, static_argnums=1)(make(key=jax.random.key(seed)), scheme)
        with jax.set_mesh(mesh):
            layout = abstract_model(functools.partial(make, key=jax.random.key(0)), mesh)
            model = jax.device_put(model, jax.tree.map(lambda leaf: leaf.sharding, layout))
        state = initial_state(model, training)
        if step is None:
            batch = abstract_batch(_BATCH, _SEQUENCE, mesh)
            step = train.trace_step(state, batch, training).lower().compile()
        for batch in batches:
            state, _ = step(state, batch, training.hyperparameters)
        found.setdefault(scheme, []).append(evaluate(state.model, validation, 32).loss)
    return found


def main(arguments: Sequence[str]) -> None:
    choose_devices()
    every: dict[str, Any] = {}
    table = [("width", "layers", "tied", *_SCHEMES.value)]
    for width, depth, tied in itertools.product(
        map(int, _WIDTHS.value), map(int, _DEPTHS.value), _TIED.value
    ):
        by_rate = [losses(width, depth, tied == "yes", float(rate)) for rate in _RATES.value]
        every[f"{width} {depth} {tied}"] = by_rate
        best = {scheme: min(np.mean(one[scheme]) for one in by_rate) for scheme in _SCHEMES.value}
        table.append((str(width), str(depth), tied, *(f"{best[s]:.3f}" for s in _SCHEMES.value)))
        print(columns(table), end="\n\n", flush=True)
        if _OUT.value:
            with open(_OUT.value, "w", encoding="utf-8") as file:
                json.dump(every, file)


if __name__ == "__main__":
    app.run(main)
