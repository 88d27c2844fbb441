"""An experiment for tests of everything but the model; compiles in a fifth of a Llama's time."""

import fiddle as fdl
from bigram import Bigram

from experiments import llama_84m
from runner.config import configs


def config() -> fdl.Config:
    cfg = llama_84m.config()
    llama_84m.tiny(cfg)
    cfg.model = fdl.Partial(Bigram, vocab=512, embed=16)
    return cfg


def small(*overrides: str) -> fdl.Config:
    """The experiment on one device, not evaluated, with settings like `steps=3`."""
    return configs.load(__file__, [], ("validation=None", "mesh.fsdp=1", *overrides))
