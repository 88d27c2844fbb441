"""Batches from flat tokens on disk, in an order that is a function of (seed, step).

The format is in docs/flat-tokens.md; seqax's is read as well.
Shape suffixes: B batch (rows), S sequence, T = S + 1 tokens of a row.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from lmlib.data.batch import Batch, packed_batch
from lmlib.data.permutation import Shuffle
from lmlib.data.stored.data_path import data_path, find_split
from lmlib.data.stored.metadata import IN_TWOS, TOKENIZER_FILE, Content, check_tokenizer_file
from lmlib.data.stored.split import open_split
from lmlib.storage.local_folder import folder_to_read, shown

if TYPE_CHECKING:
    from lmlib.data.chats.chat import ChatTemplate
    from lmlib.data.stored.teacher import Sequences
    from lmlib.data.text import TextCodec
    from lmlib.data.whole_documents import WholeDocuments

_DOCUMENTS_AT_ONCE = 256  # read and held at once


@dataclass(frozen=True)
class CutText:
    """Rows cut out of consecutive tokens, each beginning with the last token of the one before."""

    tokens: int
    sequence_length: int

    @property
    def rows(self) -> int:
        """Number of rows that predict each token except the first once."""
        return -(-(self.tokens - 1) // self.sequence_length)

    def spans(self, row: int) -> list[tuple[int, int]]:
        """Returns the tokens of `row`, as [start, stop)."""
        start = row * self.sequence_length
        return [(start, min(start + self.sequence_length + 1, self.tokens))]


class FlatTokens:
    """A split of flat tokens, cut into sequences and reshuffled each epoch.

    Packed text: sequence i predicts tokens [i·S + 1, (i+1)·S] of the concatenated shards. An epoch
    predicts every token except the very first once; the last sequence is padded. Conversations and
    pairs are never cut: a packed row holds the ones that fit, and padding. The chosen answer of a
    pair has an odd segment id, and the rejected one the next id; so have a labelled answer and the
    other one to its prompt. Rows of these have at most S tokens, with the last one among the
    inputs: a reward model reads there.

    Row r of step t is number p = t·batch_size + r: of epoch p // sequences, and there the sequence
    that the permutation keyed by (seed, epoch) puts at p % sequences.

    Attributes, in addition to those of a `Source`:
      metadata: of the split; None in seqax's format.
      tokens, documents: their number in the split, framing included.
      sequences: in an epoch; `steps_per_epoch`: steps that see each of them at least once.
      bytes_per_target: of UTF-8; None if unknown, or if only some tokens are targets.
      tokenizer_path: the tokenizer.json that made the tokens, if the data set has one.
      teacher: the metadata of the stored teacher; None if there is none.
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
          path: the data set's folder, on a disk or in a bucket.
          seed: of the order; None keeps the stored one.
          epochs: after this many all rows are padding; None never ends.
          packed: False gives each document a row, cut to its first S + 1 tokens.
          reset_positions: False counts positions from the start of the row.
          attend_across_documents: True makes a row one segment.
          begin_with_documents: True fills each row of packed text with whole documents; one of more
            than S + 1 tokens is cut. Memory then holds up to 24 MB per million documents.
          shuffled_length: tokens of packed text that stay together in the order, a multiple of
            `sequence_length`, the default. Rows of any length then have one text in one order.
          teacher: a folder of `python -m runner.cache_teacher_logits` for these sequences.

        Raises:
          FileNotFoundError: if the data set, split or teacher is not there or unfinished.
          ValueError: for invalid settings; a DamagedDataError for damaged files.
        """
        sizes = {"batch_size": batch_size, "sequence_length": sequence_length}
        for name, value in {**sizes, "epochs": 1 if epochs is None else epochs}.items():
            if not 1 <= value < 2**31:
                limit = "of at least 1" if value < 1 else "below 2^31"
                raise ValueError(f"FlatTokens needs {name} {limit}, not {value:,}")
        if seed is not None and not 0 <= seed < 2**64:
            raise ValueError(f"FlatTokens needs a seed in [0, 2**64) or None, not {seed}")
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self._path, self._split = data_path(folder_to_read(path)), split
        self._packing = {
            "reset_positions": reset_positions,
            "attend_across_documents": attend_across_documents,
        }
        self._packed, self._begin_with_documents = packed, begin_with_documents

        folder = find_split(self._path, split)
        self._stored = stored = open_split(folder)
        self.tokens, self.documents = stored.tokens, stored.documents
        self.max_token_id, self.metadata = stored.max_token_id, stored.metadata
        self.content: Content = "text" if self.metadata is None else self.metadata.content
        self.pairs, self.labelled = self.content == "pairs", self.content == "labelled"
        in_twos = self.content in IN_TWOS
        self.tokenizer = None if self.metadata is None else self.metadata.tokenizer
        tokenizer_file = self._path / TOKENIZER_FILE
        self.tokenizer_path = tokenizer_file if tokenizer_file.is_file() else None
        self.bytes_per_target: float | None = None
        if self.metadata is not None:
            check_tokenizer_file(tokenizer_file, self.metadata)
            if self.content == "text" and self.metadata.bytes and self.metadata.targets:
                self.bytes_per_target = self.metadata.bytes / self.metadata.targets
        if self.tokens < 2:
            raise ValueError(f"{folder} holds {self.tokens} tokens: at least 2 make a sequence")
        if in_twos and attend_across_documents:
            raise ValueError(
                f"{folder} holds pairs, whose answers must not see each other: leave "
                "attend_across_documents out"
            )
        self._unread = 0 if in_twos else 1  # tokens at the end of a row that are targets alone
        self.whole_rows = attend_across_documents or not (packed or in_twos)
        self._rows = self._rows_of_documents()
        self.sequences = self._rows.rows
        together = self._rows_together(shuffled_length)
        self._shuffle = Shuffle(self.sequences, batch_size, together, seed, epochs)
        self.steps_per_epoch = -(-self._shuffle.rows // batch_size)
        self.batches = None if epochs is None else -(-epochs * self._shuffle.rows // batch_size)
        self._teacher = None
        if teacher is not None:
            from lmlib.data.stored.teacher import StoredTeacher

            self._teacher = StoredTeacher(teacher, self.seen)
        self.teacher = None if self._teacher is None else self._teacher.metadata
        self.teacher_k = None if self.teacher is None else self.teacher.k

    @property
    def seen(self) -> "Sequences":
        """Returns the sequences of an epoch, without their order.

        Raises ValueError in seqax's format, which has no digests.
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
            begin_with_documents=self._begin_with_documents,
            **self._packing,
        )

    def contents(self) -> Mapping[str, str]:
        """See `lmlib.data.batch.Stored`."""
        found = {shown(find_split(self._path, self._split)): self._stored.digest}
        return found if self._teacher is None else found | self._teacher.contents()

    @property
    def compressed_bits_per_byte(self) -> dict[str, float]:
        """Bits per byte under the measured compressors, by name.

        Raises DamagedDataError if the file of measurements is damaged.
        """
        metadata = self.metadata
        if metadata is None or not metadata.bytes:
            return {}
        from lmlib.data import compressors

        measured = compressors.read(self._path / self._split)
        if metadata.gzip_bytes is not None:
            measured = {compressors.GZIP: metadata.gzip_bytes, **measured}
        return {code: 8 * length / metadata.bytes for code, length in measured.items()}

    def text_codec(self) -> "TextCodec | None":
        """See `HasText`."""
        from lmlib.data.text import BYTE_TOKENIZER, codec_of_bytes, codec_of_file

        bos_id = None if self.metadata is None else self.metadata.bos_id
        if self.tokenizer_path is not None:
            return codec_of_file(self.tokenizer_path, bos_id)
        return codec_of_bytes(bos_id) if self.tokenizer == BYTE_TOKENIZER else None

    def chat_template(self) -> "ChatTemplate | None":
        """Returns the chat template behind the texts, if any; see `read_chat_template`."""
        if self.content == "text":
            return None
        from lmlib.data.chats.chat import read_chat_template

        return read_chat_template(self._path)

    def each_document(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the ids of each document in stored order, framed, and the mask of its targets.

        Raises DamagedDataError for unreadable data, ValueError in seqax's format.
        """
        for first in range(0, self.documents, _DOCUMENTS_AT_ONCE):
            stop = min(first + _DOCUMENTS_AT_ONCE, self.documents)
            edges = self._stored.edges(first, stop)
            tokens, _, targets = self._stored.read(int(edges[0]), int(edges[-1]))()
            ends = edges[1:-1] - edges[0]
            ids = np.split(tokens.astype(np.int64), ends)
            yield from zip(ids, np.split(targets, ends), strict=True)

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """Returns the given rows of the batch of `step`; see `Source.batch`.

        Raises ValueError for a negative step, DamagedDataError for unreadable tokens.
        """
        if step < 0:
            raise ValueError(f"a batch's step must be at least 0, not {step}")
        sequence_B = self.sequence_numbers(step)[rows]
        coming = [  # start all reads before waiting for one
            [self._stored.read(*span) for span in (self._rows.spans(row) if row >= 0 else ())]
            for row in sequence_B.tolist()
        ]
        listed = None if self._teacher is None else self._teacher.read(sequence_B)
        tokens_BT = np.zeros((len(coming), self.sequence_length + 1), np.int32)
        begins_BT, targets_BT = np.zeros((2, *tokens_BT.shape), bool)
        lengths_B = np.zeros(len(coming), np.int64)
        for row, spans in enumerate(coming):
            for span in spans:
                tokens, begins, targets = span()
                there = slice(lengths_B[row], lengths_B[row] + len(tokens))
                tokens_BT[row, there] = tokens
                begins_BT[row, there], targets_BT[row, there] = begins, targets
                lengths_B[row] += len(tokens)
        lengths_B = np.maximum(lengths_B - self._unread, 0)
        batch = packed_batch(
            tokens_BT, begins_BT, lengths_B, targets_BT=targets_BT, **self._packing
        )
        if self.labelled:
            batch = replace(batch, labels=(begins_BT & targets_BT)[:, :-1])
        if listed is None:
            return batch
        ids, log_probabilities = listed()
        return replace(batch, teacher_ids=ids, teacher_log_probabilities=log_probabilities)

    def sequence_numbers(self, step: int) -> np.ndarray:
        """Returns the sequence of the split in each row of the batch of `step`; -1 is padding."""
        return self._shuffle.of_step(step)

    def _rows_together(self, shuffled_length: int | None) -> int:
        if shuffled_length is None:
            return 1
        if not isinstance(self._rows, CutText):
            raise ValueError(
                "shuffled_length applies to text that is cut across rows, but here each row "
                "begins with a document: leave it out"
            )
        if shuffled_length < 1 or shuffled_length % self.sequence_length:
            raise ValueError(
                f"shuffled_length is {shuffled_length:,}, and must be a multiple of "
                f"sequence_length, {self.sequence_length:,}"
            )
        return shuffled_length // self.sequence_length

    def _rows_of_documents(self) -> "CutText | WholeDocuments":
        if self.content == "text" and self._packed and not self._begin_with_documents:
            return CutText(self.tokens, self.sequence_length)
        from lmlib.data.whole_documents import whole_documents

        folder = str(self._path / self._split)
        capacity = self.sequence_length + self._unread
        return whole_documents(self._stored, folder, capacity, self._packed)
