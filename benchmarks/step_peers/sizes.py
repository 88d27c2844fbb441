"""What is trained in the comparison: sizes of model and batch, and the optimizer's numbers."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
from lmlib.models.llama import Llama

from lmlib.models.rematerialization import ACTIVATIONS
from runner.config.configs import load


@dataclasses.dataclass(frozen=True)
class AdamW:
    """The same for every contender. The learning rate is constant, so that none needs a schedule;
    matrices decay, norm scales do not."""

    learning_rate: float = 1e-3
    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0


ADAMW = AdamW()


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and the batch that it sees in each step.

    Args:
      name: as in --sizes.
      settings: of `Llama`; what an experiment sets is kept as it is.
      batch, sequence: rows, and tokens in a row.
      recomputed: each layer and the head are computed again in the backward pass, so that only
        their inputs are kept; if not, everything that may be kept is.
      mfu_to_reach: in percent, with the causal half, on an H100 or H200.
      changes: to lmlib's settings alone, as when trying what is fastest.
    """

    name: str
    settings: Mapping[str, Any]
    batch: int
    sequence: int
    recomputed: bool = False
    mfu_to_reach: float | None = None
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def make_model(self, precision: str) -> Callable[[], Llama]:
        """A function that makes lmlib's model, the same weights every time."""
        settings = {
            **self.settings,
            "compute_dtype": precision,
            "saved": () if self.recomputed else ACTIVATIONS,
            **self.changes,
        }
        return functools.partial(Llama, **settings, key=jax.random.key(0))

    @property
    def tokens(self) -> int:
        """In a step."""
        return self.batch * self.sequence


def _experiment_settings(name: str) -> Mapping[str, Any]:
    """What the experiment gives to `Llama`, defaults included."""
    model = load(f"experiments/{name}", ["fast"]).model
    names = inspect.signature(Llama).parameters.keys() - {"key"}
    return {name: getattr(model, name) for name in names}


_SMALL = {"vocab": 8_192, "embed": 256, "layers": 4, "heads": 4, "mlp": 1_024}
_TINY = {"vocab": 64, "embed": 32, "layers": 2, "heads": 2, "mlp": 64}


def _sizes() -> dict[str, Size]:
    sizes = [
        Size("tiny", _TINY, 8, 64),
        Size("tiny_recomputed", _TINY, 8, 64, recomputed=True),
        Size("8m_256", _SMALL, 4, 256, recomputed=True),
        Size("8m_512", _SMALL, 8, 512),
    ]
    for name, reach in {"84m": 42, "270m": 53, "540m": 61, "1b": 63, "2b": 67}.items():
        settings = _experiment_settings(f"llama_{name}")
        sizes.append(Size(name, settings, 64, 1_024, mfu_to_reach=reach))
    return {size.name: size for size in sizes}


SIZES = _sizes()
ON_CPU = ("8m_256", "8m_512")
ON_GPU = ("84m", "270m", "540m", "1b", "2b")
