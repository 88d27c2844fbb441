"""A small library and an experiment of it, to be written into files."""

from typing import Any

import pytest

from runner.config.configs import load
from runner.errors import ConfigError

LIBRARY = """
import dataclasses

class Llama:
    def __init__(self, embed: int, layers: int = 2, activation=None, dropout: float = 0, key=None):
        self.embed, self.layers = embed, layers

def silu(x):
    return x

def adamw(peak_lr, betas=(0.9, 0.95), decay: float | None = None, *, nesterov=False):
    return peak_lr

@dataclasses.dataclass
class Files:
    path: str
    names: list = dataclasses.field(default_factory=list)

class Data:
    def __init__(self, files, batch=8, rules={"mlp": "tensor"}, seed: int | None = None):
        self.files, self.batch = files, batch

def evaluate(files, every=100):
    return files

def anything(**settings):
    return settings

class Experiment:
    def __init__(self, model, optimizer, data, validation=None, prompts=(), extra=None, name="run"):
        self.model, self.data, self.validation = model, data, validation
"""

EXPERIMENT = '''
"""A small run.

    python -m runner --fdl_config=…
"""

import fiddle as fdl
from library import Data, Experiment, Files, Llama, adamw, anything, evaluate, silu

def config() -> fdl.Config:
    files = fdl.Config(Files, path="corpus")
    return fdl.Config(
        Experiment,
        model=fdl.Partial(Llama, embed=64, activation=silu),
        optimizer=fdl.Partial(adamw, peak_lr=3e-4),
        data=fdl.Config(Data, files, batch=16),
        validation=[fdl.Config(evaluate, files)],
        prompts=["Once", "The"],
        extra=fdl.Config(anything, one=1),
    )

def tiny(cfg):
    """One layer of embed 8.

    More text.
    """
    cfg.model.embed = 8
    cfg.model.layers = 1

def double(cfg):
    cfg.model.embed *= 2

def scale(cfg, layers, embed=32):
    """Any size."""
    cfg.model.layers, cfg.model.embed = layers, embed

def broken(cfg):
    cfg.model.embedd = 8

def _private(cfg):
    pass
'''


def error(*arguments: Any, **more: Any) -> str:
    """The message with which `load` refuses a config."""
    with pytest.raises(ConfigError) as raised:
        load(*arguments, **more)
    return str(raised.value)
