"""Small data sets for the data tests."""

from collections.abc import Callable

import numpy as np
import pytest

from lmlib.data.stored.metadata import SplitMetadata, read_split
from lmlib.data.stored.shard_writer import ShardWriter

WriteDocuments = Callable[..., SplitMetadata]


@pytest.fixture(scope="session")
def write_documents():
    """Writes documents (sequences of ids below 300) as a split cut into very small pieces."""

    def write(path, documents, split="train", shards=1, **settings):
        small = {"vocab_size": 300, "file_length": 32, "chunk_length": 8}
        borders = [len(documents) * shard // shards for shard in range(shards + 1)]
        for shard in range(shards):
            writer = ShardWriter(path, split, shard=shard, shards=shards, **(small | settings))
            for document in documents[borders[shard] : borders[shard + 1]]:
                writer.append(np.array(document, np.int64), text_bytes=2 * len(document))
            writer.finish()
        return read_split(path / split)

    return write


@pytest.fixture(scope="session")
def example_documents():
    """Sixty documents of up to 20 ids, one in ten of them empty."""
    rng = np.random.default_rng(0)
    return [
        rng.integers(0, 300, 0 if number % 10 == 3 else rng.integers(1, 20)).tolist()
        for number in range(60)
    ]


@pytest.fixture(scope="session")
def example(tmp_path_factory, write_documents, example_documents):
    """A data set of the example documents in several shards; for reading only."""
    path = tmp_path_factory.mktemp("example")
    write_documents(path, example_documents, shards=4)
    return path
