"""The work of all contenders: sizes, weights, batches and hyperparameters.

Shapes: B batch, S sequence, E embed, H heads, K kv_heads, D head_dim, F mlp, V vocab, L layers.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from lmlib.compute import EVERYTHING, Compute
from lmlib.data.batch import Batch
from lmlib.data.synthetic import Synthetic
from lmlib.models.decoder import Decoder
from lmlib.models.experts.mixture import Mixture
from lmlib.models.families.experts.mixtral import mixtral
from lmlib.models.families.hybrid.qwen3_next import qwen3_next
from lmlib.models.families.llama import llama
from runner.config.configs import load

ON_CPU = ("8m_256", "8m_512")
ON_GPU = ("84m", "270m", "540m", "1b", "2b")
_PYTORCH = "pytorch_eager", "pytorch_compiled"
PEERS_OF_LLAMA = "jax", *_PYTORCH
PEERS_OF_MIXTRAL = "dense", *_PYTORCH, "transformers", "transformers_grouped"
Weights = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class AdamW:
    """The hyperparameters of all contenders; the rate is constant, and norm scales do not decay."""

    learning_rate: float = 1e-3
    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and the batch of each step.

    Args:
      name, settings: as in --sizes, and the arguments of the family.
      batch, sequence: rows, and tokens per row.
      recomputed: True to recompute each layer and the head in the backward pass; otherwise it keeps
        as much as possible.
      adamw: the optimizer's hyperparameters; with a small learning rate, losses stay comparable.
      computed: the experiment's `Compute`, except for precision and saved activations.
      changes: further settings of `Compute`, to find the fastest.
      family: makes the model.
    """

    name: str
    settings: Mapping[str, Any]
    batch: int
    sequence: int
    recomputed: bool = False
    adamw: AdamW = AdamW()
    computed: Compute = Compute()
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    family: Callable[..., Decoder] = llama

    @property
    def model(self) -> Callable[..., Decoder]:
        """The constructor of lmlib's model, which takes a key."""
        return functools.partial(self.family, **self.settings)

    def make_model(self) -> Decoder:
        """Makes lmlib's model with the same weights every time."""
        return self.model(key=jax.random.key(0))

    def compute(self, precision: str) -> Compute:
        """Returns lmlib's settings for this size."""
        saved = () if self.recomputed else EVERYTHING
        settings = {"dtype": precision, "saved": saved, **self.changes}
        return dataclasses.replace(self.computed, **settings)

    @property
    def peers(self) -> Sequence[str]:
        """The other contenders that implement this family."""
        return {llama: PEERS_OF_LLAMA, mixtral: PEERS_OF_MIXTRAL}.get(self.family, ())

    @property
    def rope_theta(self) -> float:
        """The base of the rotary positions."""
        return inspect.signature(self.family).parameters["rope_theta"].default

    @property
    def tokens(self) -> int:
        """The number of tokens per step."""
        return self.batch * self.sequence


@dataclasses.dataclass(frozen=True)
class Work:
    """One size in one precision, with the same weights and batches for all contenders.

    `precision` is the dtype of activations, and of weights in matmuls; all else is float32. A row
    is one document, or several if `packed`. With `muon`, lmlib's step uses Muon instead of AdamW.
    """

    size: Size
    precision: str
    steps: int
    packed: bool = False
    muon: bool = False

    @functools.cached_property
    def weights(self) -> Weights:
        return named_weights(jax.jit(self.size.make_model)())

    @functools.cached_property
    def batches(self) -> list[Batch]:
        size = self.size
        source = Synthetic(size.settings["vocab"], size.batch, size.sequence)
        batches = [source.batch(step) for step in range(self.steps)]
        return batches if self.packed else list(map(one_document_rows, batches))


class Contender(Protocol):
    """A training step, compiled at once or at its first use, and its state."""

    def run(self, steps: range) -> list[float]:
        """Runs these steps, each with its own batch, and returns their losses in nats per token."""

    def planned_bytes(self) -> int | None:
        """Returns the peak device memory that the step's compiler planned; `None` if unknown."""

    def peak_bytes(self) -> int | None:
        """Returns the device memory that its library has used at most; `None` if unknown.

        JAX counts from the start of the process, so only the process's first size is measured.
        """


def named_weights(model: Decoder) -> Weights:
    """Returns the weights in float32 in host memory, by name, with layers stacked."""
    ((block,),) = model.stack.patterns
    attention, mlp = block.attention, block.mlp
    weights = {
        "embedding": model.embedding,
        "unembedding": model.unembedding,
        "norm": model.norm.scale,
        "attention_norm": block.attention_norm.scale,
        "mlp_norm": block.mlp_norm.scale,
    }
    weights |= {name: getattr(attention, name) for name in ("query", "key", "value", "output")}
    if isinstance(mlp, Mixture):
        weights["router"], mlp = mlp.router.logits, mlp.experts
    return jax.device_get(weights | {name: getattr(mlp, name) for name in ("gate", "up", "down")})


def one_document_rows(batch_BS: Batch) -> Batch:
    """Returns the batch with one document per row, which needs only the causal mask."""
    rows, sequence = batch_BS.tokens.shape
    return Batch(
        tokens=batch_BS.tokens,
        targets=batch_BS.targets,
        segment_ids=np.ones_like(batch_BS.segment_ids),
        positions=np.tile(np.arange(sequence, dtype=np.int32), (rows, 1)),
        loss_mask=np.ones_like(batch_BS.loss_mask),
        whole_rows=True,
    )


def hybrid(*, heads: int, head_dim: int, layers: int, **sizes: Any) -> Decoder:
    """Returns a Llama with Gated DeltaNet instead of attention in three of four layers."""
    return qwen3_next(
        heads=heads, head_dim=head_dim, layers=layers, **sizes, kv_heads=heads,
        dense_layers=(*range(layers),), linear_heads=heads, linear_kv_heads=heads,
        linear_key_dim=head_dim, linear_value_dim=head_dim,
    )  # fmt: skip


_SMALL = {"vocab": 8_192, "embed": 256, "layers": 4, "heads": 4, "mlp": 1_024}
_TINY = {"vocab": 64, "embed": 32, "layers": 2, "heads": 2, "mlp": 64}


def dense_of(mixture: Size) -> Size:
    """Returns the dense model whose MLP is as large as the experts of a token together.

    Both then multiply each token by the same number of weights, apart from the router.
    """
    settings = dict(mixture.settings)
    settings["mlp"] *= settings.pop("top")
    del settings["experts"]
    return dataclasses.replace(mixture, settings=settings, family=llama)


def _sizes() -> dict[str, Size]:
    sizes = [
        Size("tiny", _TINY, 8, 64),
        Size("tiny_recomputed", _TINY, 8, 64, recomputed=True),
        Size("8m_256", _SMALL, 4, 256, recomputed=True),
        Size("8m_512", _SMALL, 8, 512),
        Size("tiny_hybrid", _TINY | dict(layers=4, head_dim=16), 8, 64, family=hybrid),
        Size("tiny_mixture", _TINY | dict(experts=4, top=2, mlp=32), 8, 64, family=mixtral),
        Size("8_of_512", _SMALL | dict(experts=8, top=2, mlp=512), 8, 512, family=mixtral),
        Size("32_of_256", _SMALL | dict(experts=32, top=4, mlp=256), 8, 512, family=mixtral),
    ]
    for name in ON_GPU:
        cfg = load(f"experiments/llama_{name}", ["fast"])
        settings, compute = cfg.model.__arguments__, Compute(**cfg.compute.__arguments__)
        adamw = AdamW(1e-3 if settings["embed"] <= 1_024 else 1e-4)
        sizes.append(Size(name, settings, 64, 1_024, False, adamw, compute))
        if name == "1b":
            sizes.append(
                Size("hybrid_1b", settings, 64, 1_024, False, adamw, compute, family=hybrid)
            )
    mixture = {"vocab": 32_768, "embed": 1_024, "layers": 8, "heads": 8, "head_dim": 128}
    mixture |= dict(experts=8, top=2, mlp=2_048)
    computed = Compute(unroll=8, logits_dtype="bfloat16")
    sizes.append(Size("8x2048", mixture, 64, 1_024, computed=computed, family=mixtral))
    larger = {"vocab": 32_768, "embed": 2_048, "layers": 16, "heads": 16, "head_dim": 128}
    larger |= dict(experts=8, top=2, mlp=2_816)  # of 2.6 billion weights a token uses a third
    computed, adamw = dataclasses.replace(computed, unroll=16), AdamW(1e-4)
    sizes.append(Size("8x2816", larger, 32, 1_024, False, adamw, computed, family=mixtral))
    return {size.name: size for size in sizes}


SIZES = _sizes()
