"""Data to evaluate a model on: a split of flat tokens, or files of text."""

import contextlib
import dataclasses
from collections.abc import Iterator

import fiddle as fdl
import numpy as np

from data_tools.rows.block import TextField
from data_tools.rows.files import Files
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.stored.data_path import data_path, is_seqax_split
from lmlib.data.stored.metadata import (
    IN_TWOS,
    Content,
    read_split,
    shard_folders,
    tokenizers_differ,
)
from lmlib.evaluate.documents import Document
from runner.config.text import nodes
from runner.errors import ConfigError
from runner.inference.loaded import Loaded


@dataclasses.dataclass(frozen=True)
class StoredTokens:
    """A split of flat tokens.

    Text sizes are measured on the decoded documents. As in training, only the answers of
    conversations count.
    """

    name: str
    source: FlatTokens

    @property
    def tokens(self) -> int | None:
        """The number of tokens, if known in advance."""
        return self.source.tokens

    def documents(self, loaded: Loaded) -> Iterator[Document]:
        """Yields the documents in the ids of `loaded`.

        Raises ValueError or OSError if they cannot be read, or have another tokenizer's ids.
        """
        source = self.source
        _check_no_pairs(self.name, source.content)
        if tokenizers_differ(source.tokenizer, loaded.tokenizer):
            raise ConfigError(
                f"{self.name} has ids of {source.tokenizer}, and {loaded.name} was trained with "
                f"{loaded.tokenizer}: give the text itself"
            )
        if source.max_token_id >= loaded.model.vocab:
            raise ConfigError(
                f"{self.name} has token ids up to {source.max_token_id}, but the vocabulary of "
                f"{loaded.name} ends at {loaded.model.vocab - 1}; give the text itself"
            )
        codec = source.text_codec() or loaded.codec
        for ids, is_target in source.each_document():
            if source.content != "text":
                yield Document(ids, is_target=is_target)
            elif codec is None:
                yield Document(ids)
            else:
                text = codec.decode(ids.tolist())
                yield Document(ids, len(text.encode()), len(text))


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """Text files with a document each, or JSON lines or Parquet with a document per row."""

    name: str
    files: Files
    tokens = None  # unknown in advance

    def documents(self, loaded: Loaded) -> Iterator[Document]:
        """Yields the documents; raises as `StoredTokens.documents`."""
        codec = loaded.codec
        if codec is None:
            raise ConfigError(
                f"no tokenizer of {loaded.name} is known, and {self.name} is text: give --tokenizer"
            )
        end = [] if loaded.document_end is None else [loaded.document_end]
        some = False
        for block in self.files.blocks(0, 1):
            for row in block.rows(self.files.field):
                if row.text is None:
                    raise ConfigError(f"{block.locate(row)}; repair it, or leave it out")
                some = some or bool(row.text)
                ids = np.array([*codec.encode(row.text), *end], np.int64)
                yield Document(ids, len(row.text.encode()), len(row.text))
        if not some:
            raise ConfigError(f"{self.name} holds no text")


DataSet = StoredTokens | TextFiles


def data_set(path: str, split: str, text_column: str) -> DataSet:
    """Opens a folder of flat tokens, or a file or folder of text.

    Raises ValueError or OSError if `path` is neither.
    """
    folder = data_path(path)
    within = [each for each in folder.iterdir() if each.is_dir()] if folder.is_dir() else []
    if any(shard_folders(each) or is_seqax_split(each) for each in within):
        length, packed = 1, True
        with contextlib.suppress(FileNotFoundError):  # the error below is clearer
            metadata = read_split(folder / split)
            _check_no_pairs(path, metadata.content)
            if metadata.content != "text":  # documents must fit a row
                length, packed = max(1, metadata.tokens), False
        return _stored(f"{path} {split}", FlatTokens(path, split, 1, length, packed=packed))
    if not folder.exists():
        raise ConfigError(f"--data={path}: there is no such file or folder")
    return TextFiles(path, Files([str(folder)], field=TextField(text_column)))


def validation_of(loaded: Loaded) -> list[DataSet]:
    """Returns the run's own validation sets, if they are flat tokens.

    Raises ValueError or OSError if they cannot be read.
    """
    validation = None if loaded.cfg is None else loaded.cfg.validation
    named = validation if isinstance(validation, dict) else {"validation": validation}
    return [
        _stored(name, fdl.build(node))
        for name, value in named.items()
        for node in nodes(value)
        if fdl.get_callable(node) is FlatTokens
    ]


def _stored(name: str, source: FlatTokens) -> StoredTokens:
    return StoredTokens(name if source.content == "text" else f"{name}, answers", source)


def _check_no_pairs(name: str, content: Content) -> None:
    if content in IN_TWOS:
        raise ConfigError(f"{name} holds pairs of answers, which have no loss: give other data")
