"""Synthetic data with structure that a model can learn: no files, any vocabulary.

Shape suffixes: B batch (rows), T tokens of a row: the sequence and one more.
"""

from dataclasses import replace

import numpy as np

from lmlib.data.batch import Batch, packed_batch
from lmlib.data.permutation import hash_words

STRIDES = 4  # strides 1 … 4; two tokens of a document reveal its stride
DOCUMENTS_PER_ROW = 4  # on average
NOISE_PERIOD = 16  # one token in 16 is replaced by a random one

# Distinct purposes of hashes, so that no two draws are correlated.
_BOUNDARY, _FIRST_TOKEN, _STRIDE, _IS_NOISE, _NOISE = range(5)


class Synthetic:
    """Rows of short arithmetic progressions modulo `vocab_size`, with noise.

    Each document starts at a random token and adds a random stride of 1 to 4 at each step; one
    token in 16 is random instead. A model that sees only the last token can reach a loss of about
    log 4. Everything is a function of (seed, step, row).
    """

    def __init__(
        self,
        vocab_size: int,
        batch_size: int,
        sequence_length: int,
        seed: int = 0,
        teacher_k: int | None = None,
        labels: bool = False,
    ) -> None:
        """`teacher_k`: ids listed per token by a synthetic teacher, which knows nothing.

        `labels`: True for a label of each odd document; the first token decides.
        """
        if vocab_size < 2:
            raise ValueError(f"Synthetic needs a vocab_size of at least 2, not {vocab_size}")
        for name, value in (("batch_size", batch_size), ("sequence_length", sequence_length)):
            if value < 1:
                raise ValueError(f"Synthetic needs a {name} of at least 1, not {value}")
        self.vocab_size = vocab_size
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self.seed = seed
        self.teacher_k, self.labelled = teacher_k, labels
        self.max_token_id = vocab_size - 1
        self.tokenizer = None
        self.batches = None
        self.bytes_per_target = None

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """Returns the given rows of the batch of `step`; see `Source.batch`."""
        row_B1 = np.arange(self.batch_size)[rows, None]
        place_T = np.arange(self.sequence_length + 1)
        mean_length = max(1, self.sequence_length // DOCUMENTS_PER_ROW)

        def draw(purpose: int, place: np.ndarray, choices: int) -> np.ndarray:
            digest = hash_words(self.seed, step, row_B1, purpose, place)
            return (digest % np.uint64(choices)).astype(np.int64)

        starts_BT = (draw(_BOUNDARY, place_T, mean_length) == 0) | (place_T == 0)
        start_BT = np.maximum.accumulate(np.where(starts_BT, place_T, 0), axis=1)
        stride_BT = 1 + draw(_STRIDE, start_BT, STRIDES)
        first_BT = draw(_FIRST_TOKEN, start_BT, self.vocab_size)
        progression_BT = (first_BT + stride_BT * (place_T - start_BT)) % self.vocab_size
        is_noise_BT = draw(_IS_NOISE, place_T, NOISE_PERIOD) == 0
        noise_BT = draw(_NOISE, place_T, self.vocab_size)
        tokens_BT = np.where(is_noise_BT, noise_BT, progression_BT)
        lengths_B = np.full(len(tokens_BT), self.sequence_length)
        batch = packed_batch(tokens_BT, starts_BT, lengths_B)
        if self.labelled:
            begins_BS = (batch.positions == 0) & (batch.segment_ids % 2 == 1)
            batch = replace(batch, labels=begins_BS & (batch.tokens % 2 == 0))
        if self.teacher_k is None:
            return batch
        following = np.arange(self.teacher_k, dtype=np.int32)
        ids = (batch.tokens[..., None] + following) % np.int32(self.vocab_size)
        likely = np.full(ids.shape, -np.log(self.vocab_size), np.float16)
        return replace(batch, teacher_ids=ids, teacher_log_probabilities=likely)
