"""What is trained in the comparison: sizes of model and batch, and the optimizer's numbers."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from lmlib.compute import EVERYTHING, Compute
from lmlib.models.decoder import Decoder
from lmlib.models.families.experts.mixtral import mixtral
from lmlib.models.families.llama import llama
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


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and the batch that it sees in each step.

    Args:
      name: as in --sizes.
      settings: of the family; what an experiment sets is kept as it is.
      batch, sequence: rows, and tokens in a row.
      recomputed: each layer and the head are computed again in the backward pass, so that only
        their inputs are kept; if not, everything that may be kept is.
      adamw: its learning rate is so small that rounding does not decide where losses go.
      mfu_to_reach: in percent, with the causal half, on an H100 or H200.
      computed: how lmlib computes it, as an experiment sets it; the precision and what is kept are
        set here.
      changes: to lmlib's `Compute` alone, as when trying what is fastest.
      family: makes the model.
    """

    name: str
    settings: Mapping[str, Any]
    batch: int
    sequence: int
    recomputed: bool = False
    adamw: AdamW = AdamW()
    mfu_to_reach: float | None = None
    computed: Compute = Compute()
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    family: Callable[..., Decoder] = llama

    @property
    def model(self) -> Callable[..., Decoder]:
        """Makes lmlib's model from a key."""
        return functools.partial(self.family, **self.settings)

    def make_model(self) -> Decoder:
        """lmlib's model, the same weights every time."""
        return self.model(key=jax.random.key(0))

    def compute(self, precision: str) -> Compute:
        """How lmlib computes it."""
        saved = () if self.recomputed else EVERYTHING
        settings = {"dtype": precision, "saved": saved, **self.changes}
        return dataclasses.replace(self.computed, **settings)

    @property
    def has_peers(self) -> bool:
        """Whether the others have written this family too."""
        return self.family is llama

    @property
    def tokens(self) -> int:
        """In a step."""
        return self.batch * self.sequence


def _of_experiment(name: str) -> tuple[Mapping[str, Any], Compute]:
    """What the experiment gives to `llama`, defaults included, and how it computes it."""
    cfg = load(f"experiments/{name}", ["fast"])

    def given(config: Any, to: Callable[..., Any]) -> dict[str, Any]:
        names = inspect.signature(to).parameters.keys() - {"key"}
        return {name: getattr(config, name) for name in names}

    return given(cfg.model, llama), Compute(**given(cfg.compute, Compute))


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
        settings, compute = _of_experiment(f"llama_{name}")
        adamw = AdamW(1e-3 if settings["embed"] <= 1_024 else 1e-4)
        sizes.append(Size(name, settings, 64, 1_024, False, adamw, reach, compute))
    mixture = {"embed": 1_024, "layers": 8, "heads": 8, "head_dim": 128, "mlp": 2_048}
    mixture |= {"vocab": 32_768, "experts": 8, "top": 2}
    computed = Compute(unroll=8, logits_dtype="bfloat16")
    sizes.append(Size("8x2048", mixture, 64, 1_024, computed=computed, family=mixtral))
    return {size.name: size for size in sizes}


SIZES = _sizes()
ON_CPU = ("8m_256", "8m_512")
ON_GPU = ("84m", "270m", "540m", "1b", "2b")
