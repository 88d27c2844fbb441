"""Writes megatron.bin and megatron.idx with Megatron-Core's own builder.

pip install --no-deps megatron-core    # and torch
python tests/data_tools/golden/update_megatron.py
"""

from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

HERE = Path(__file__).parent
DOCUMENTS = [[[5, 6], [7, 0]], [], [[65_000, 1, 0]], [[0]]]  # sentences of documents


if __name__ == "__main__":
    writer = IndexedDatasetBuilder(str(HERE / "megatron.bin"), dtype=np.uint16)
    for sentences in DOCUMENTS:
        for sentence in sentences:
            writer.add_item(torch.tensor(sentence))
        writer.end_document()
    writer.finalize(str(HERE / "megatron.idx"))
