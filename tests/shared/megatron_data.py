"""Writes Megatron's indexed data sets by their definition."""

import numpy as np

CODES = {"u1": 1, "i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<f8": 6, "<f4": 7, "<u2": 8}


def write_megatron(prefix, documents, dtype="<i4"):
    """Each document is a list of sequences of tokens."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    begins = (np.cumsum(lengths) - lengths) * np.dtype(dtype).itemsize
    firsts = np.cumsum([0, *map(len, documents)])
    prefix.with_suffix(".bin").write_bytes(np.concatenate([*sequences, []]).astype(dtype).tobytes())
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0"
        + np.array([1], "<u8").tobytes()
        + bytes([CODES[dtype]])
        + np.array([len(sequences), len(firsts)], "<u8").tobytes()
        + lengths.tobytes()
        + begins.astype("<i8").tobytes()
        + firsts.astype("<i8").tobytes()
    )
