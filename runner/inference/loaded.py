"""A saved model with its tokenizer, loaded onto this machine's devices.

Shapes: S sequence (queries), T sequence (keys), L layers, E embed, V vocab.
"""

import dataclasses
import functools
import operator
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import fiddle as fdl
import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding
from jaxtyping import Float

from lmlib.compute import Compute
from lmlib.data.chats.chat import answer_ends
from lmlib.data.text_stream import TextStream
from lmlib.generate import Generator, Sampling
from lmlib.inspect import Inspector
from lmlib.models.model import check_is_model, longest_sequence
from lmlib.parallel.axes import LayoutError
from lmlib.parallel.check import check_model
from lmlib.parallel.matrix import number_of_weights
from lmlib.parallel.mesh import make_mesh
from lmlib.runs.run import Run
from lmlib.terminal.quantities import count_text
from lmlib.terminal.text import shown
from runner.errors import ConfigError, did_you_mean, user_errors
from runner.inference.answer import DecodingOptions
from runner.inference.prompts import AS_NUMBERS
from runner.processes.agreement import agreed
from runner.weights.model_folder import ModelFolder
from runner.weights.models import SavedRun, use_model
from runner.weights.target import LoadOptions
from runner.weights.texts import Texts

USUAL = Sampling(temperature=0.8, top_p=0.95)


class TokenLoss(NamedTuple):
    """The loss of a token, predicted from the tokens before it."""

    id: int
    # the text that the token adds; a character of several tokens comes with its last token
    text: str
    nats: float  # -log p of the token


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
      workdir: the run's folder; `None` for a Hugging Face folder.
      generation_settings: the content of a folder's generation_config.json; empty for a run.
      cfg: the run's config; builds its `Experiment` if its data and its mesh are available.
    """

    model: Any
    mesh: Mesh
    compute: Compute
    name: str
    step: int | None
    workdir: Path | None
    generation_settings: Mapping[str, Any]
    cfg: fdl.Config | None

    def __repr__(self) -> str:
        """Returns the name, step, number of parameters and loss, in one line."""
        count = number_of_weights(self.model)
        parts = [f"{count_text(count)} parameters"]
        if self.step is not None and self.workdir is not None:
            parts = [f"step {self.step:,}", *parts, Run(self.workdir).loss_text(self.step)]
        return f"Loaded({shown(self.name)}: {', '.join(filter(None, parts))})"

    @functools.cached_property
    def answer_ends(self) -> tuple[int, ...]:
        """The tokens that end an answer, of the model and its chat template."""
        ids = set(self.end_ids)
        if self.chat_template is not None and self.codec is not None:
            ids |= answer_ends(self.chat_template, self.codec)
        return tuple(sorted(id for id in ids if id < self.model.vocab))

    def beyond_training(self, length: int) -> str | None:
        """Returns a warning if sequences in training were shorter than `length`, else `None`."""
        if self.longest is None or length <= self.longest:
            return None
        return f"the model was trained on {self.longest:,} tokens at most, and may get {length:,}"

    def ids(self, text: str | Sequence[int]) -> list[int]:
        """Returns the tokens of a text, begun like a document; ids are returned unchanged."""
        if not isinstance(text, str):
            try:
                if isinstance(text, bytes):
                    raise TypeError
                return [operator.index(id) for id in text]
            except TypeError as error:
                raise ValueError(
                    f"the text must be a string or a list of token ids, got {text!r:.80}"
                ) from error
        if self.codec is None:
            raise ConfigError(
                f"{self.name} has no known tokenizer: give token ids, or load(…, tokenizer=FOLDER)"
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
        stop: str | Sequence[str] = (),
        **settings: Any,
    ) -> str:
        """Continues the text up to one of `answer_ends`.

        Warns if it may become longer than any sequence in training.

        Args:
          max_tokens: maximum number of new tokens.
          stop: a string, or several, that end the text. They may contain names of special tokens.
          settings: replace settings of `sampling`: `temperature=0.7`, `top_p=0.9` …

        Raises:
          ValueError: if an argument has a wrong type or value. See also `lmlib.generate.Generator`.
        """
        ids = self.ids(text)
        stop = (stop,) if isinstance(stop, str) else stop
        _check("max_tokens", max_tokens, 1, 2**31)
        _check("seed", seed, 0, 2**32)
        if not isinstance(stop, Iterable) or not all(isinstance(each, str) for each in stop):
            raise ValueError(f"stop must be a string, or a list of strings, got {stop!r:.80}")
        if not isinstance(sampling, Sampling):
            raise ValueError(f"sampling must be a Sampling, got {sampling!r:.80}")
        known = [field.name for field in dataclasses.fields(Sampling)]
        for name in settings.keys() - set(known):
            names = [*known, "max_tokens", "seed", "stop"]
            raise ValueError(f"generate has no setting {name!r}. {did_you_mean(name, names)}")
        sampling = dataclasses.replace(sampling, **settings)
        codec = self.codec or AS_NUMBERS
        ends = self.answer_ends
        manner = DecodingOptions(codec, ends, tuple(stop), max_tokens, sampling, 1, seed)
        needed = len(ids) + max_tokens
        room = 1 << (needed - 1).bit_length()  # powers of two, so that few lengths are compiled
        generator = self._generator(max(needed, min(room, self.longest or room)))
        if warning := self.beyond_training(needed):
            warnings.warn(warning, stacklevel=2)
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


def _check(name: str, value: Any, least: int, end: int) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, got {value!r:.80}")
    if not least <= value < end:
        raise ValueError(f"{name} must be in [{least}, {end:,}), got {value}")


def load(
    reference: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    dtype: str | None = None,
    tokenizer: str | None = None,
    trusted: Collection[str] = (),
    init_from: str | None = None,
    average: bool | None = None,
    show: Callable[[str], None] = lambda line: None,
) -> Loaded:
    """Loads a saved model: a run `WORKDIR[@STEP]`, a Hugging Face or PEFT folder, or a Hub name.

    Every process must call it. The run's data may be missing, and its mesh need not fit these
    devices.

    Args:
      mesh: the devices. `None`: all devices, with sharded weights if they divide evenly, else with
        copies. On a single device the model is loaded without a mesh.
      dtype: dtype of the computation. `None`: the run's, or float32 for a folder.
      tokenizer: a tokenizer.json or its folder, instead of the known one.
      trusted, init_from, average, show: as in `LoadOptions`.

    Raises:
      ConfigError: if there is no such model, it is damaged, or the run removes it meanwhile. If no
        step is named, the next newest checkpoint is tried first.
    """

    def loaded_from(source: SavedRun | ModelFolder) -> Loaded:
        # Finds damage in the small files before gigabytes are read.
        texts = source.texts.read(tokenizer, show)
        check_is_model(source.shapes)
        chosen = mesh or _mesh_for(source.abstract_model)
        return Loaded(
            **vars(texts) | {"longest": texts.longest or longest_sequence(source.shapes)},
            model=source.model(chosen),
            mesh=chosen,
            compute=Compute(dtype=dtype or source.compute_dtype),
            name=source.name,
            step=source.step,
            workdir=source.workdir,
            generation_settings=source.generation_settings,
            cfg=source.cfg,
        )

    options = LoadOptions(trusted, init_from, average, show)
    with agreed(), user_errors():
        loaded = use_model(os.fspath(reference), loaded_from, options)
    if mesh is not None or loaded.mesh.size > 1:
        return loaded
    alone = SingleDeviceSharding(loaded.mesh.devices.item())
    return dataclasses.replace(loaded, model=jax.device_put(loaded.model, alone))


def _mesh_for(abstract_model: Callable[[Mesh], Any]) -> Mesh:
    """Returns a mesh of all devices that shards the weights if they divide, else copies them."""
    split = make_mesh(fsdp=-1)
    try:
        check_model(abstract_model(split), split)
    except LayoutError:
        return make_mesh(data=-1)
    return split
