"""The tokenizer, end tokens and chat template of a saved model."""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fiddle as fdl

from lmlib.data.chats.chat import ChatTemplate, read_chat_template
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.stored.metadata import LARGEST_TOKENIZER, TokenizerIdentity, tokenizers_differ
from lmlib.data.text import BYTE_TOKENIZER, TextCodec, beginning_of, codec_of_bytes, codec_of_file
from lmlib.hf.folder import read_json
from lmlib.hf.hub import TOKENIZER_FILES
from lmlib.storage.stored_json import read_text
from runner.config.text import nodes
from runner.errors import ConfigError

FILE = "tokenizer.json"


@dataclasses.dataclass(frozen=True, eq=False)
class Texts:
    """Conversion between a model's token ids and text.

    Attributes:
      codec: converts between texts and ids; `None` without a known tokenizer.
      tokenizer_file: the tokenizer.json behind `codec`, or `None`.
      end_ids: tokens that end a text; empty if none are known.
      document_end: the token that ended each training document; `None` if unknown.
      tokenizer: the tokenizer of the ids that the model was trained on; `None` if unknown.
      tokenizer_folder: a Hugging Face folder with the tokenizer's files.
      chat_template: the template of the training conversations, or else of `tokenizer_folder`, or
        `None`.
      longest: length of the longest training sequence in tokens; `None` if unknown.
    """

    codec: TextCodec | None
    tokenizer_file: Path | None
    end_ids: tuple[int, ...]
    document_end: int | None
    tokenizer: TokenizerIdentity | None
    tokenizer_folder: Path | None
    chat_template: ChatTemplate | None
    longest: int | None


def tokenizer_of(folder: Path, name: str) -> TokenizerIdentity | None:
    """Returns the tokenizer in a model's folder, called `name`; `None` without a tokenizer.json."""
    if not (folder / FILE).is_file():
        return None
    text = read_text(folder / FILE, LARGEST_TOKENIZER)
    return TokenizerIdentity(name, hashlib.sha256(text.encode()).hexdigest())


@dataclasses.dataclass(frozen=True)
class TextSources:
    """Places to look for a model's tokenizer and texts: its data first, then its folder."""

    name: str  # name of the run or the folder
    folder: tuple[Path, str] | None  # a folder that may hold a tokenizer, and its name, or `None`
    model_folder: Path | None  # the folder with the model's config.json, or `None`.
    data: Sequence[Any] = ()  # the configs of a run's data, stage by stage
    noted: TokenizerIdentity | None = None  # the tokenizer in a checkpoint's notes
    # True if the model was trained on `data`; False if it is only about to be
    has_trained: bool = False

    @functools.cached_property
    def flat_tokens(self) -> list[FlatTokens]:
        """The flat tokens among the data that still exist or can be made again."""
        found = []
        for node in nodes(self.data):
            if fdl.get_callable(node) is FlatTokens:
                with contextlib.suppress(ValueError, OSError):
                    found.append(fdl.build(node))
        return found

    @property
    def first(self) -> FlatTokens | None:
        return next(iter(self.flat_tokens), None)

    @property
    def tokenizer(self) -> TokenizerIdentity | None:
        """The tokenizer of the ids that the model knows."""
        if self.first is not None and self.has_trained:
            return self.first.tokenizer
        return self.noted or self._tokenizer_of_folder

    @functools.cached_property
    def _tokenizer_of_folder(self) -> TokenizerIdentity | None:
        return None if self.folder is None else tokenizer_of(*self.folder)

    @property
    def tokenizer_folder(self) -> Path | None:
        """`folder`, if it has a tokenizer, unless the model was trained with another tokenizer."""
        folder = None if self.folder is None else self.folder[0]
        if folder is None or not any((folder / name).is_file() for name in TOKENIZER_FILES):
            return None
        trained_on = self.tokenizer if self.first is None else self.first.tokenizer
        return None if tokenizers_differ(self._tokenizer_of_folder, trained_on) else folder

    def check_tokenizer(self) -> None:
        """Raises ConfigError if the data was tokenized differently during training."""
        if self.first is None or not self.has_trained:
            return
        if tokenizers_differ(self.noted, self.first.tokenizer):
            raise ConfigError(
                f"{self.name} was trained with the tokenizer {self.noted}, but its data now has "
                f"{self.first.tokenizer}: give --tokenizer, or restore the data"
            )

    @property
    def config(self) -> dict[str, Any]:
        """The content of config.json in the model folder; empty if there is none."""
        file = None if self.model_folder is None else self.model_folder / "config.json"
        return read_json(file) if file is not None and file.is_file() else {}

    @property
    def longest(self) -> int | None:
        """The length of the longest training sequence in tokens, if known."""
        known = (self.config.get(name) for name in ("max_position_embeddings", "n_positions"))
        lengths: list[Any] = [each for each in known if isinstance(each, int)][:1]
        if self.has_trained:
            lengths += [getattr(data, "sequence_length", None) for data in self.data]
        return max((length for length in lengths if isinstance(length, int)), default=None)

    def template_of_data(self) -> ChatTemplate | None:
        """Returns the chat template of the training conversations, or `None`.

        Raises ValueError or OSError if it is damaged.
        """
        templates = (data.chat_template() for data in self.flat_tokens)
        return next((each for each in templates if each is not None), None)

    def read(self, tokenizer: str | None, show: Callable[[str], None]) -> Texts:
        """Reads the tokenizer's files.

        Raises ValueError or OSError if a file is damaged, or the tokenizer changed since training.

        Args:
          tokenizer: a tokenizer.json or its folder, instead of the known one.
          show: called with a warning about a damaged chat template.
        """
        ends, first = self._end_ids(), self.first
        metadata = None if first is None else first.metadata
        document_end = None if metadata is None else metadata.eos_id
        end_ids = ends if document_end is None else (document_end,)
        codec: TextCodec | None = None
        file: Path | None = None
        folder: Path | None
        template: ChatTemplate | None = None
        if tokenizer is not None:
            file = Path(tokenizer, FILE) if Path(tokenizer).is_dir() else Path(tokenizer)
            folder, document_end = file.parent, None
            known = tokenizer_of(folder, tokenizer)
        else:
            self.check_tokenizer()
            folder, known = self.tokenizer_folder, self.tokenizer
            if first is not None and first.tokenizer == known:
                codec, file = first.text_codec(), first.tokenizer_path
            if file is None and folder is not None and (folder / FILE).is_file():
                file = folder / FILE
        if codec is None and file is not None:
            codec = codec_of_file(file, beginning_of(file, ends))
        if codec is None and known == BYTE_TOKENIZER:
            codec = codec_of_bytes(None)
        try:
            template = self.template_of_data() if tokenizer is None else None
            if template is None and folder is not None:
                template = read_chat_template(folder)
        except (ValueError, OSError) as error:
            show(f"WARNING: the chat template cannot be used: {error}")
        return Texts(codec, file, end_ids, document_end, known, folder, template, self.longest)

    def _end_ids(self) -> tuple[int, ...]:
        """Returns the end tokens in generation_config.json, or else in config.json."""
        for name in ("generation_config.json", "config.json"):
            if self.model_folder is not None and (self.model_folder / name).is_file():
                said = read_json(self.model_folder / name).get("eos_token_id")
                ids = said if isinstance(said, list) else [said]
                if known := tuple(id for id in ids if type(id) is int):
                    return known
        return ()
