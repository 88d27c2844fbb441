"""Reward models: a decoder whose last features give each text a number.

Shapes: B batch, S sequence, E embed.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.compute import Compute
from lmlib.models.decoder import Decoder
from lmlib.models.model import WeightGroup
from lmlib.models.weights import fan_in, initial_values, jit_init, weight
from lmlib.parallel.layout import reshard, spec


class RewardModel(Decoder):
    """A decoder with a vector `score` instead of an unembedding; transformers' classifiers.

    The reward of a text is `scores` at its last token. `lmlib.losses.preferences.bradley_terry`
    trains it. Its logits, by the table of embeddings, mean nothing.
    """

    rows_may_be_split = True

    score: Float[Array, "embed"] | None = weight(fan_in("embed"), decays=True)

    def __init__(self, decoder: Decoder, score: Float[Array, "embed"] | None):
        """`score=None`: shapes of the other weights alone."""
        for field in dataclasses.fields(Decoder):
            setattr(self, field.name, getattr(decoder, field.name))
        self.unembedding, self.score = None, score

    def scores(self, h_BSE: Float[Array, "b s embed"], compute: Compute) -> Float[Array, "b s"]:
        """Returns the reward of the text up to each token, in float32 or wider."""
        assert self.score is not None
        wide = jnp.promote_types(compute.dtype, jnp.float32)
        h_BSE, score_E = reshard(h_BSE, "batch seq embed"), reshard(self.score, "embed")
        return jnp.einsum(
            "bse,e->bs", h_BSE, score_E.astype(compute.dtype), preferred_element_type=wide,
            out_sharding=spec("batch seq"),
        )  # fmt: skip

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> Any:
        raise ValueError("a reward model gives texts a number: it cannot generate")

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        return self.stack.flops_per_token(sequence_length, causal)

    def weight_groups(self) -> tuple[WeightGroup, ...]:
        score = () if self.score is None else (WeightGroup("score", self.score),)
        return (*super().weight_groups(), *score)


def reward_model(of: Callable[..., Decoder], *, key: PRNGKeyArray, **arguments: Any) -> RewardModel:
    """Makes a reward model from the decoder of `of(**arguments, key=…)`, for `Experiment.model`.

    model=fdl.Partial(reward_model, of=fdl.Partial(llama, …))
    """

    def model(key: PRNGKeyArray) -> RewardModel:
        made = RewardModel(of(**arguments, key=key), None)
        score_E = initial_values(made, "score", key, embed=made.embedding.shape[-1])
        return RewardModel(made, score_E)

    return jit_init(model)(key)
