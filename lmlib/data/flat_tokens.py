"""Batches from flat tokens on disk, in an order that is a function of (seed, step).

The format is in docs/flat-tokens.md; seqax's is read as well.
Shape suffixes: B batch (rows), S sequence, T = S + 1 tokens of a row.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lmlib.data.batch import Batch
from lmlib.data.packing import packed_batch
from lmlib.data.permutation import SequencesOfSteps, Shuffle
from lmlib.data.stored.damage import DamagedDataError
from lmlib.data.stored.data_path import data_to_read
from lmlib.data.stored.metadata import (
    TOKENIZER_FILE,
    Content,
    SplitMetadata,
    TokenizerIdentity,
    check_tokenizer_file,
)
from lmlib.data.stored.seqax import SeqaxSplit, is_seqax_split
from lmlib.data.stored.split import StoredSplit
from lmlib.data.stored.split_folder import find_split
from lmlib.data.whole_documents import WholeDocuments, arranged
from lmlib.storage.bucket.copies import shown

if TYPE_CHECKING:
    from lmlib.data.chats.chat import ChatTemplate
    from lmlib.data.stored.teacher import Sequences, StoredTeacher, TeacherMetadata
    from lmlib.data.text import TextCodec

_DOCUMENTS_AT_ONCE = 256  # that are read and held


class FlatTokens:
    """A split of flat tokens, cut into sequences and shuffled anew each epoch.

    Packed, sequence i predicts tokens [i·S + 1, (i+1)·S] of the concatenated shards, so that an
    epoch predicts every token but the very first exactly once; the last sequence is padded. Not
    packed, sequence i is document i, its first S + 1 tokens if it is longer.

    With `begin_with_documents` each row begins with a document, as evaluation and generation do,
    and holds as many whole ones as fit, chosen by their lengths alone; the rest of it is padding,
    little where most documents are short. A document of more than S + 1 tokens has a row to itself,
    and what lies beyond these tokens no epoch has; all else each epoch has once.

    Conversations, and pairs of them, are never cut: packed, each row holds as many as fit, chosen
    by their lengths alone, and the rest of it is padding; not packed, it holds one. A pair is two
    neighbouring documents of a row, so its chosen answer has an odd segment id, and the rejected
    one the even id after it.

    Row r of step t is number p = t·batch_size + r: of epoch p // sequences, and there the sequence
    that the permutation keyed by (seed, epoch) puts at p % sequences. With `shuffled_length` pieces
    of so many tokens are shuffled, and rows cut out of them: whatever their length, they have the
    same text in the same order.
    """

    def __init__(
        self,
        path: str,
        split: str,
        batch_size: int,
        sequence_length: int,
        seed: int | None = 0,
        epochs: int | None = None,
        packed: bool = True,
        reset_positions: bool = True,
        attend_across_documents: bool = False,
        begin_with_documents: bool = False,
        shuffled_length: int | None = None,
        teacher: str | None = None,
    ) -> None:
        """Opens the split.

        Args:
          path: the data set's folder, in this library's format or seqax's; in a bucket too, from
            where tokens are read by chunks, which are then kept on this machine.
          batch_size: rows of the global batch.
          sequence_length: tokens in a row.
          seed: of the order; None keeps the stored one.
          epochs: rows past so many are padding; None never ends.
          packed: whether rows hold what fits of the documents, or one each.
          reset_positions: whether positions count from the start of each document, or of the row.
          attend_across_documents: whether a row is one segment.
          begin_with_documents: whether each row of packed text begins with a document; rows of
            conversations always do. Where all documents start is then read and held, 16 MB for a
            million.
          shuffled_length: tokens of packed text that stay together in the order, a multiple of
            `sequence_length`; None: those of a row.
          teacher: a folder of `python -m runner.teach`, with what a teacher said of these
            sequences, which batches then have too.

        Raises:
          FileNotFoundError: if the data set, split or teacher is not there or unfinished.
          ValueError: for settings or metadata that make no sense.
          DamagedDataError: (a ValueError) if the stored arrays are damaged.
        """
        sizes = {"batch_size": batch_size, "sequence_length": sequence_length}
        for name, value in {**sizes, "epochs": 1 if epochs is None else epochs}.items():
            if value < 1:
                raise ValueError(f"FlatTokens needs {name} of at least 1, not {value}")
            if value >= 2**31:
                raise ValueError(f"FlatTokens needs {name} below 2^31, not {value:,}")
        if seed is not None and not 0 <= seed < 2**64:
            raise ValueError(f"FlatTokens needs a seed in [0, 2**64) or None, not {seed}")
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self._path, self._split = data_to_read(path), split
        self._epochs, self._packed = epochs, packed
        self._reset_positions = reset_positions
        self._attend_across_documents = attend_across_documents
        self._begin_with_documents = begin_with_documents

        folder = find_split(self._path, split)
        self._stored = SeqaxSplit(folder) if is_seqax_split(folder) else StoredSplit(folder)
        if self.metadata is not None:
            check_tokenizer_file(self._path / TOKENIZER_FILE, self.metadata)
        if self.tokens < 2:
            raise ValueError(f"{folder} holds {self.tokens} tokens: at least 2 make a sequence")
        if self.pairs and attend_across_documents:
            raise ValueError(
                f"{folder} holds pairs, whose answers must not see each other: leave "
                "attend_across_documents out"
            )
        self.whole_rows = attend_across_documents or not (packed or self.pairs)  # see `Whole`
        self._whole = self._whole_documents(folder)
        if not packed:
            self._stored.document_bounds(np.zeros(1, np.int64))  # can they be had?
        together = self._rows_together(shuffled_length)
        self._shuffle = Shuffle(self.sequences, together, seed, epochs)
        self._sequences = SequencesOfSteps(self._shuffle, batch_size)
        self._teacher = None if teacher is None else self._stored_teacher(teacher)

    @property
    def metadata(self) -> SplitMetadata | None:
        """What the data set says of itself; None in seqax's format."""
        return self._stored.metadata if isinstance(self._stored, StoredSplit) else None

    @property
    def content(self) -> Content:
        """What the documents are."""
        return "text" if self.metadata is None else self.metadata.content

    @property
    def pairs(self) -> bool:
        """Whether documents are pairs of a chosen and a rejected answer."""
        return self.content == "pairs"

    @property
    def max_token_id(self) -> int:
        """The largest token id in the split."""
        described = self._stored if isinstance(self._stored, SeqaxSplit) else self._stored.metadata
        return described.max_token_id

    @property
    def tokenizer(self) -> TokenizerIdentity | None:
        """What made the ids; None if unknown."""
        return self.metadata.tokenizer if self.metadata is not None else None

    @property
    def seen(self) -> "Sequences":
        """The sequences that a model sees, whatever their order.

        Raises ValueError in seqax's format, which does not say whether arrays are what they were.
        """
        if self.metadata is None:
            raise ValueError(
                f"{self._path} is in seqax's format, and a teacher needs the digests of "
                "docs/flat-tokens.md: convert it with python -m data_tools.convert"
            )
        from lmlib.data.stored.teacher import Sequences

        return Sequences(
            data=self.metadata.digest,
            split=self._split,
            sequences=self.sequences,
            sequence_length=self.sequence_length,
            packed=self._packed,
            reset_positions=self._reset_positions,
            attend_across_documents=self._attend_across_documents,
            begin_with_documents=self._begin_with_documents,
        )

    def contents(self) -> Mapping[str, str]:
        """See `lmlib.data.batch.Stored`."""
        found = {shown(find_split(self._path, self._split)): self._stored.digest}
        return found if self._teacher is None else found | self._teacher.contents()

    def _stored_teacher(self, path: str) -> "StoredTeacher":
        from lmlib.data.stored.teacher import StoredTeacher

        return StoredTeacher(path, self.seen)

    @property
    def teacher(self) -> "TeacherMetadata | None":
        """What is known of the stored teacher; None if there is none."""
        return None if self._teacher is None else self._teacher.metadata

    @property
    def teacher_k(self) -> int | None:
        """See `Taught`."""
        return None if self.teacher is None else self.teacher.k

    @property
    def tokens(self) -> int:
        """Tokens in the split, framing included."""
        return self._stored.tokens

    @property
    def documents(self) -> int:
        """Documents in the split."""
        return self._stored.documents

    @property
    def sequences(self) -> int:
        """Sequences in an epoch."""
        if self._whole is not None:
            return self._whole.rows
        return -(-(self.tokens - 1) // self.sequence_length) if self._packed else self.documents

    @property
    def steps_per_epoch(self) -> int:
        """Steps that see each sequence at least once."""
        return -(-self._shuffle.rows // self.batch_size)

    @property
    def batches(self) -> int | None:
        """Steps until the last epoch has nothing left; None without end."""
        if self._epochs is None:
            return None
        return -(-self._epochs * self._shuffle.rows // self.batch_size)

    @property
    def bytes_per_target(self) -> float | None:
        """UTF-8 bytes for each target of the split; None if unknown, or if only some are targets.

        Targets of text are all tokens but the first of each document.
        """
        metadata = self.metadata
        if metadata is None or metadata.content != "text":
            return None
        return metadata.bytes / metadata.targets if metadata.bytes and metadata.targets else None

    @property
    def compressed_bits_per_byte(self) -> dict[str, float]:
        """What compressors need for the texts, as far as it was measured; `compressors` has the
        names. Raises DamagedDataError if the record of that is damaged."""
        metadata = self.metadata
        if metadata is None or not metadata.bytes:
            return {}
        from lmlib.data import compressors

        measured = compressors.read(self._path / self._split)
        if metadata.gzip_bytes is not None:
            measured = {compressors.GZIP: metadata.gzip_bytes, **measured}
        return {code: 8 * length / metadata.bytes for code, length in measured.items()}

    @property
    def tokenizer_path(self) -> Path | None:
        """The tokenizer.json that made the tokens, if the data set has one."""
        file = self._path / TOKENIZER_FILE
        return file if file.is_file() else None

    def text_codec(self) -> "TextCodec | None":
        """See `HasText`."""
        from lmlib.data.text import BYTE_TOKENIZER, codec_of_bytes, codec_of_file

        bos_id = None if self.metadata is None else self.metadata.bos_id
        if self.tokenizer_path is not None:
            return codec_of_file(self.tokenizer_path, bos_id)
        return codec_of_bytes(bos_id) if self.tokenizer == BYTE_TOKENIZER else None

    def chat_template(self) -> "ChatTemplate | None":
        """What made texts of conversations; None if nothing did, and for text.

        Raises ValueError or OSError if it is damaged.
        """
        if self.content == "text":
            return None
        from lmlib.data.chats.chat import read_chat_template

        return read_chat_template(self._path)

    def each_document(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The ids of each document in the order they are stored in, framing included, and which of
        them are targets (bool): of text all but the first.

        Raises DamagedDataError for what cannot be read, ValueError in seqax's format.
        """
        for first in range(0, self.documents, _DOCUMENTS_AT_ONCE):
            numbers = np.arange(first, min(first + _DOCUMENTS_AT_ONCE, self.documents))
            starts, stops = self._stored.document_bounds(numbers)
            tokens, _, targets = self._stored.read(int(starts[0]), int(stops[-1])).result()
            ends = stops[:-1] - starts[0]
            ids = np.split(tokens.astype(np.int64), ends)
            yield from zip(ids, np.split(targets, ends), strict=True)

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """The given rows of the batch of `step`; see `Source.batch`.

        Raises ValueError for a negative step, DamagedDataError for tokens that cannot be read.
        """
        if step < 0:
            raise ValueError(f"a batch's step must be at least 0, not {step}")
        sequence_B = self._sequence_numbers(step, rows)
        coming = [  # all under way before any wait
            [self._stored.read(start, stop) for start, stop in spans if start < stop]
            for spans in self._spans(sequence_B)
        ]
        listed = None if self._teacher is None else self._teacher.read(sequence_B)
        tokens_BT = np.zeros((len(coming), self.sequence_length + 1), np.int32)
        begins_BT, targets_BT = np.zeros((2, *tokens_BT.shape), bool)
        lengths_B = np.zeros(len(coming), np.int64)
        for row, spans in enumerate(coming):
            for span in spans:
                tokens, begins, targets = span.result()
                there = slice(lengths_B[row], lengths_B[row] + len(tokens))
                tokens_BT[row, there] = tokens
                begins_BT[row, there], targets_BT[row, there] = begins, targets
                lengths_B[row] += len(tokens)
        batch = packed_batch(
            tokens_BT,
            begins_BT,
            lengths_B=np.maximum(lengths_B - 1, 0),
            targets_BT=targets_BT,
            reset_positions=self._reset_positions,
            attend_across_documents=self._attend_across_documents,
        )
        if listed is None:
            return batch
        ids, log_probabilities = listed.result()
        return replace(batch, teacher_ids=ids, teacher_log_probabilities=log_probabilities)

    def sequence_numbers(self, step: int) -> np.ndarray:
        """Which sequence of the split each row of the batch of `step` is; -1 for padding.

        Not packed, these are the numbers of documents.
        """
        return self._sequence_numbers(step, slice(None))

    def _sequence_numbers(self, step: int, rows: slice) -> np.ndarray:
        return self._sequences.of_step(step)[rows]

    def _spans(self, sequence_B: np.ndarray) -> list[list[tuple[int, int]]]:
        """Which tokens belong to each sequence, as [start, stop); none for sequence -1."""
        if self._whole is not None:
            return [
                [] if sequence < 0 else self._whole.spans(sequence)
                for sequence in sequence_B.tolist()
            ]
        is_padding_B = sequence_B < 0
        sequence_B = np.where(is_padding_B, 0, sequence_B)
        if self._packed:
            start_B = sequence_B * self.sequence_length
            end_B = np.full_like(start_B, self.tokens)
        else:
            start_B, end_B = self._stored.document_bounds(sequence_B)
        stop_B = np.minimum(start_B + self.sequence_length + 1, end_B)
        stop_B = np.where(is_padding_B, start_B, stop_B)
        spans = zip(start_B.tolist(), stop_B.tolist(), strict=True)
        return [[span] for span in spans]

    def _rows_together(self, shuffled_length: int | None) -> int:
        """Raises ValueError if rows are no cuts of pieces of `shuffled_length`."""
        if shuffled_length is None:
            return 1
        if self._whole is not None or not self._packed:
            raise ValueError(
                "shuffled_length is of text that is cut across rows, and here a row begins with a "
                "document: leave it out"
            )
        if shuffled_length < 1 or shuffled_length % self.sequence_length:
            raise ValueError(
                f"shuffled_length is {shuffled_length:,}, and must be a multiple of "
                f"sequence_length, {self.sequence_length:,}"
            )
        return shuffled_length // self.sequence_length

    def _whole_documents(self, folder: Path) -> WholeDocuments | None:
        """The rows of documents that begin rows; None if they do not.

        Raises ValueError if some must not be cut and are too long, or in seqax's format,
        DamagedDataError if they are no pairs.
        """
        capacity = self.sequence_length + 1
        if self.content == "text" and not (self._begin_with_documents and self._packed):
            return None
        if not isinstance(self._stored, StoredSplit):
            raise ValueError(
                f"{folder} is in seqax's format, of which begin_with_documents cannot read where "
                "documents start: convert it with python -m data_tools.convert, or leave it out"
            )
        edges = self._stored.document_edges()
        if self.content == "text":
            return arranged(edges, capacity, packed=True)
        if self.pairs:
            if (np.diff(edges) < 2).any():
                raise DamagedDataError(
                    f"{folder} holds documents of fewer than two tokens in pairs"
                )
            edges = edges[::2]
        lengths_U = np.diff(edges)
        if too_long := int((lengths_U > capacity).sum()):
            raise ValueError(
                f"{too_long:,} of the {self.content} in {folder} have more than sequence_length + "
                f"1 = {capacity:,} tokens, the longest {lengths_U.max():,}, and none is ever cut: "
                f"take a sequence_length of {lengths_U.max() - 1:,}, or prepare the data again "
                f"with --max_length={capacity}"
            )
        return arranged(edges, capacity, self._packed)
