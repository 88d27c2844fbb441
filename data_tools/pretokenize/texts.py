"""From the texts of a block to framed tokens."""

import gzip
from dataclasses import dataclass

import numpy as np

from data_tools.encoders import Encoder
from data_tools.encoding import EncodedBlock
from data_tools.held_out import Part
from data_tools.rows.block import Block, Field, Row


@dataclass(frozen=True)
class TextRecipe:
    """Documents are the texts of rows; see `Recipe`."""

    encoder: Encoder
    bos_id: int | None
    eos_id: int | None
    vocab_size: int
    field: Field
    part: Part | None  # whose documents are kept; None: all
    gzip_baseline: bool  # whether to measure each text under gzip -9

    def block_encoder(self) -> "TextEncoder":
        """See `Recipe.block_encoder`."""
        return TextEncoder(self)


class TextEncoder:
    """See `BlockEncoder`."""

    def __init__(self, recipe: TextRecipe) -> None:
        self._recipe = recipe
        self._encoder = recipe.encoder
        self._dtype = np.uint16 if recipe.vocab_size <= 2**16 else np.uint32

    def encode(self, block: Block) -> EncodedBlock:
        """The block's documents; a row whose text cannot be encoded is among the bad rows."""
        texts: list[str] = []
        sizes: list[int] = []
        compressed: list[int] = []
        bad_rows: list[tuple[int, Row]] = []
        part = self._recipe.part
        for row in block.rows(self._recipe.field):
            text, problem = row.text, row.problem
            if text is not None:
                try:
                    size = self._encoder.size(text)
                except ValueError as error:
                    text, problem = None, str(error)
            if text is None:
                if part is None or not part.held_out:  # so that it counts once
                    bad_rows.append((len(texts), Row(row.where, None, problem)))
                continue
            if part is not None and not part.has(text):
                continue
            texts.append(text)
            sizes.append(size)
            if self._recipe.gzip_baseline:
                compressed.append(len(gzip.compress(text.encode(), 9)))
        tokens, lengths = self._framed(self._encoder.encode(texts))
        measured = np.array(compressed, np.int64) if self._recipe.gzip_baseline else None
        return EncodedBlock(tokens, lengths, np.array(sizes, np.int64), measured, tuple(bad_rows))

    def _framed(self, documents: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        recipe = self._recipe
        before = [] if recipe.bos_id is None else [np.array([recipe.bos_id], self._dtype)]
        after = [] if recipe.eos_id is None else [np.array([recipe.eos_id], self._dtype)]
        lengths = np.array([len(ids) for ids in documents], np.int64) + len(before) + len(after)
        parts = [part for ids in documents for part in (*before, ids, *after)]
        tokens = np.concatenate(
            [np.zeros(0, self._dtype), *parts], dtype=self._dtype, casting="unsafe"
        )
        return tokens, lengths
