"""A loaded model with its tokenizer.

Shapes: S sequence (queries), T sequence (keys), L layers, E embed, V vocab.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import fiddle as fdl
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from lmlib.compute import Compute
from lmlib.data.text_stream import TextStream
from lmlib.generate import Generator, Sampling
from lmlib.inspect import Inspector
from runner.errors import ConfigError
from runner.inference.answer import Manner
from runner.inference.prompts import AS_NUMBERS
from runner.weights.texts import Texts

USUAL = Sampling(temperature=0.8, top_p=0.95)


class TokenLoss(NamedTuple):
    """The loss of a token, predicted from the tokens before it.

    Attributes:
      text: the text that the token adds; a character of several tokens comes with its last token.
      nats: -log p of the token.
    """

    id: int
    text: str
    nats: float


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Loaded(Texts):
    """A model with its tokenizer.

    Its methods take a text or token ids, and set the mesh themselves. They raise ConfigError for a
    text without a known tokenizer, and ValueError for input that the model cannot take.

    Attributes (see also `Texts`):
      model: the float32 weights. On one device they are made without a mesh unless `load` got one;
        on several devices they are sharded over `mesh` as they are stored.
      compute: settings of the computation: the run's dtype, and defaults for everything else.
      name: name of the weights: `WORKDIR@STEP`, or the folder's name.
      step: step of the run's checkpoint; `None` for a Hugging Face folder.
      generation_settings: the content of a folder's generation_config.json; empty for a run.
      cfg: the run's config; builds its `Experiment` if its data and its mesh are available.
    """

    model: Any
    mesh: Mesh
    compute: Compute
    name: str
    step: int | None
    generation_settings: Mapping[str, Any]
    cfg: fdl.Config | None

    def ids(self, text: str | Sequence[int]) -> list[int]:
        """Returns the tokens of a text, begun like a document; ids are returned unchanged."""
        if not isinstance(text, str):
            return [int(id) for id in text]
        if self.codec is None:
            raise ConfigError(
                f"{self.name} knows no tokenizer: give token ids, or load(…, tokenizer=FOLDER)"
            )
        return self.codec.encode(text)

    def logits(self, text: str | Sequence[int]) -> Float[np.ndarray, "s vocab"]:
        """Returns the logits for the next token at each position."""
        return self._inspector.logits(self.ids(text))

    def token_losses(self, text: str | Sequence[int]) -> list[TokenLoss]:
        """Returns the loss of each token except the first."""
        ids = self.ids(text)
        stream = TextStream(AS_NUMBERS if self.codec is None else self.codec)
        texts = [stream.push([id]) for id in ids]
        texts[-1:] = [texts[-1] + stream.finish()] if texts else []
        nats = self._inspector.token_losses(ids)
        return [*map(TokenLoss, ids[1:], texts[1:], nats.tolist())]

    def activations(self, text: str | Sequence[int]) -> Float[np.ndarray, "depth s embed"]:
        """Returns the residual stream before the first layer and after each layer."""
        return self._inspector.activations(self.ids(text))

    def logit_lens(self, text: str | Sequence[int]) -> Float[np.ndarray, "depth s vocab"]:
        """Returns the logits computed from each of `activations`, as if the model ended there."""
        return self._inspector.logit_lens(self.ids(text))

    def attention(self, text: str | Sequence[int]) -> Float[np.ndarray, "layers heads s t"]:
        """Returns the attention weights of each query (s) on each key (t), by layer and head."""
        return self._inspector.attention(self.ids(text))

    def generate(
        self,
        text: str | Sequence[int],
        max_tokens: int = 100,
        sampling: Sampling = USUAL,
        seed: int = 0,
        stop: Sequence[str] = (),
    ) -> str:
        """Continues the text up to the first of the strings `stop`.

        Stop strings may contain names of special tokens; an empty one raises ValueError. See also
        `lmlib.generate.Generator`.
        """
        ids = self.ids(text)
        codec = self.codec or AS_NUMBERS
        manner = Manner(codec, self.end_ids, tuple(stop), max_tokens, sampling, 1, seed)
        needed = len(ids) + max_tokens
        room = 1 << (needed - 1).bit_length()  # powers of two, so that few lengths are compiled
        generator = self._generator(max(needed, min(room, self.longest or room)))
        *_, (answer,) = manner.rounds(generator, [ids], [0])
        return answer.text

    @functools.cached_property
    def _inspector(self) -> Inspector:
        return Inspector(self.model, self.compute, self.mesh, self.longest)

    @functools.cached_property
    def _generator(self) -> Callable[[int], Generator]:
        """A function that makes a generator for a length, and caches the last one."""
        return functools.lru_cache(maxsize=1)(
            lambda length: Generator(self.model, self.mesh, self.compute, rows=1, length=length)
        )
