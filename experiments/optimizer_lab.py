"""Optimizers side by side, 200 steps of 512 tokens; 2.0e11 FLOPs, 1 minute on 2 CPU cores.

    python -m runner --fdl_config=experiments/optimizer_lab --workdir=/tmp/optimizer_lab
    python -m runner.sweep --fdl_config=experiments/optimizer_lab --workdir=/tmp/optimizer_rates
    python -m runner.sweep --fdl_config=experiments/optimizer_lab --points=seeds \\
        --workdir=/tmp/optimizers

Each optimizer takes its best rate at width 64, which CompleteP transfers to width 128.
docs/optimizers.md has the result. It has the model and the text of experiments/transfer.
"""

import fiddle as fdl

from experiments import transfer
from experiments.base.small_llama import tiny as tiny
from lmlib.experiment import Experiment
from lmlib.optim.adamw import adamw
from lmlib.optim.ademamix import ademamix
from lmlib.optim.matrices.dion import dion
from lmlib.optim.matrices.muon import muon
from lmlib.optim.matrices.shampoo import shampoo
from lmlib.optim.matrices.soap import soap
from lmlib.optim.matrices.soap_muon import soap_muon
from lmlib.optim.schedule_free import ScheduleFree
from lmlib.optim.schedules import warmup_constant
from lmlib.sweeps import Points, axis, chain, product, zipped

_FACTORS = 0.5, 1.0, 2.0  # of the best rate
# Each optimizer, its best rate at width 64, and the steps at width 128 that take the CPU-seconds of
# 200 of AdamW.
_METHODS = {
    "adamw": (fdl.Partial(adamw), 32e-3, 200),
    "cautious_adamw": (fdl.Partial(adamw, cautious=True), 32e-3, 200),
    "ademamix": (fdl.Partial(ademamix), 32e-3, 199),
    "schedule_free": (fdl.Partial(adamw, b1=0.0), 32e-3, 197),
    "muon": (fdl.Partial(muon, dtype="float32"), 64e-3, 166),
    "normuon": (fdl.Partial(muon, dtype="float32", neuron_decay=0.95), 64e-3, 161),
    "soap": (fdl.Partial(soap), 16e-3, 116),
    "shampoo": (fdl.Partial(shampoo), 32e-3, 117),
    "soap_muon": (fdl.Partial(soap_muon, dtype="float32"), 64e-3, 79),
    "dion": (fdl.Partial(dion), 32e-3, 175),
}


def config(embed: int = 64, method: str = "muon") -> fdl.Config[Experiment]:
    """Trains a small Llama with one of the optimizers.

    Args:
      embed: width; 64 gives 0.25 million parameters, 128 gives 0.9 million.
      method: adamw, cautious_adamw, ademamix, schedule_free, muon, normuon, soap, shampoo,
        soap_muon or dion.
    """
    if method not in _METHODS:
        raise ValueError(f"method is one of {', '.join(_METHODS)}, not {method!r}")
    cfg = transfer.config(embed)
    optimizer, rate, _ = _METHODS[method]
    cfg.optimizer = fdl.copy_with(optimizer, peak_lr=rate, schedule=cfg.optimizer.schedule)
    if method == "schedule_free":
        cfg.average = fdl.Config(ScheduleFree)
        cfg.optimizer.schedule = fdl.Partial(warmup_constant, warmup=0.05)
    return cfg


def sweep() -> Points:
    """Each optimizer at three rates a factor of two apart, width 64, one seed."""
    return chain(
        *(
            product(
                axis("method", method), axis("optimizer.peak_lr", *(rate * x for x in _FACTORS))
            )
            for method, (_, rate, _) in _METHODS.items()
        )
    )


def seeds() -> Points:
    """Each optimizer at its best rate, width 128, three seeds: equal tokens."""
    return product(axis("embed", 128), axis("method", *_METHODS), axis("seed", 0, 1, 2))


def equal_seconds() -> Points:
    """The same in as many CPU-seconds as 200 steps of AdamW."""
    steps = axis("steps", *(steps for *_, steps in _METHODS.values()))
    return product(
        axis("embed", 128), zipped(axis("method", *_METHODS), steps), axis("seed", 0, 1, 2)
    )
