import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusals

from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.stored.journal import writing
from lmlib.data.stored.metadata import JOURNAL_FILE, TokenizerIdentity, read_shard
from lmlib.data.stored.shard_writer import ShardWriter
from lmlib.storage.atomic_file import UNFINISHED

IDS = st.integers(0, 299) | st.just(0)  # zeros, the fill value, come often
DOCUMENTS = st.lists(st.lists(IDS, max_size=70), max_size=12)
ALONE = "shard_00000_of_00001"


def stored(path):
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}
    return ts.open(spec | {"fill_missing_data_reads": False}).result().read().result()


@settings(max_examples=40)
@given(
    documents=DOCUMENTS,
    bos_id=st.none() | st.just(0),
    eos_id=st.none() | st.just(1),
    chunk_length=st.integers(1, 9),
    chunks_per_file=st.integers(1, 4),
)
def test_round_trip(tmp_path_factory, documents, bos_id, eos_id, chunk_length, chunks_per_file):
    path = tmp_path_factory.mktemp("round_trip")
    writer = ShardWriter(
        path,
        "train",
        vocab_size=300,
        bos_id=bos_id,
        eos_id=eos_id,
        chunk_length=chunk_length,
        file_length=chunk_length * chunks_per_file,
    )
    for document in documents:
        writer.append(np.array(document, np.int64), len(document), 1)
    prefix, suffix = ([] if id is None else [id] for id in (bos_id, eos_id))
    framed = [prefix + document + suffix for document in documents]
    flat = [token for document in framed for token in document]
    assert (writer.totals.tokens, writer.totals.documents) == (len(flat), len(documents))

    metadata = writer.finish()
    folder = path / "train" / ALONE
    assert read_shard(folder) == metadata
    assert (metadata.tokens, metadata.documents) == (len(flat), len(documents))
    assert metadata.targets == sum(max(0, len(document) - 1) for document in framed)
    assert metadata.bytes == sum(map(len, documents))
    assert metadata.gzip_bytes == len(documents)
    assert metadata.max_token_id == max(flat, default=-1)

    arrays = {
        name: stored(folder / name) for name in ("tokens", "document_starts", "first_documents")
    }
    assert [array.dtype for array in arrays.values()] == [np.uint16, np.uint64, np.uint64]
    assert arrays["tokens"].tolist() == flat
    starts = [sum(map(len, framed[:number])) for number in range(len(framed))]
    assert arrays["document_starts"].tolist() == starts
    chunks = -(-len(flat) // chunk_length)
    assert arrays["first_documents"].tolist() == [
        sum(start < chunk * chunk_length for start in starts) for chunk in range(chunks + 1)
    ]
    assert sorted(entry.name for entry in folder.iterdir()) == sorted([*arrays, "metadata.json"])


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_ids_up_to_the_vocabulary_are_stored(tmp_path, write_documents, vocab_size, dtype):
    write_documents(tmp_path, [[0, vocab_size - 1]], vocab_size=vocab_size)
    tokens = stored(tmp_path / "train" / ALONE / "tokens")
    assert tokens.dtype == dtype
    assert tokens.tolist() == [0, vocab_size - 1]
    for bad in (-1, vocab_size):
        with pytest.raises(ValueError, match="documents from number 1 on have token ids"):
            write_documents(tmp_path, [[5], [bad]], split=f"{bad}", vocab_size=vocab_size)


def abandoned(path, **settings):
    """A shard with only one of its files."""
    small = {"vocab_size": 300, "file_length": 4, "chunk_length": 2}
    writer = ShardWriter(path, "train", **(small | settings))
    for _ in range(2):
        writer.append(np.array([7, 8, 9]), 1)
    writer.close()


def test_other_documents_cannot_go_on_with_a_shard(tmp_path):
    abandoned(tmp_path)
    writer = ShardWriter(tmp_path, "train", vocab_size=300, file_length=4, chunk_length=2)
    with pytest.raises(ValueError, match="documents differ from those"):
        writer.append(np.array([7, 8, 10]), 1)
        writer.append(np.array([9]), 1)
        writer.append(np.array([7, 8, 9]), 1)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        *(("journal.json", content, "is damaged.*delete") for content in ("", "{}", "[1]")),
        ("document_starts.partial", "", "lost its end"),
    ],
)
def test_a_damaged_file_of_an_unfinished_shard_is_an_error(tmp_path, file, content, message):
    writer = ShardWriter(tmp_path, "train", vocab_size=300, file_length=4, chunk_length=2)
    for number in range(4):
        writer.mark(number)
        writer.append(np.array([7, 8, 9]), 1)
    writer.close()
    folder = tmp_path / "train" / ALONE
    (folder / f".{JOURNAL_FILE}.0123456789abcdef{UNFINISHED}").write_text("{")  # a kill leaves it
    abandoned(tmp_path)
    (folder / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        abandoned(tmp_path)


def test_splits_share_one_tokenizer(tmp_path):
    def write(split, tokenizer):
        writer = ShardWriter(tmp_path, split, vocab_size=300, tokenizer=tokenizer)
        writer.append(np.array([1, 2]), 2)
        writer.finish()

    for split in ("train", "validation"):
        write(split, TokenizerIdentity("bytes", None))
    for other in (None, TokenizerIdentity("other", "00")):
        with pytest.raises(ValueError, match="share one tokenizer"):
            write("test", other)


def test_a_shard_without_documents(tmp_path):
    for shard, documents in enumerate(([[5, 6]], [], [[7]])):
        writer = ShardWriter(tmp_path, "train", shard=shard, shards=3, vocab_size=300)
        for document in documents:
            writer.append(np.array(document), 1)
        writer.finish()
    batch = FlatTokens(str(tmp_path), "train", 1, 4, seed=None).batch(0)
    assert batch.tokens.tolist() == [[5, 6, 0, 0]]


@pytest.mark.parametrize(("setting", "message"), refusals(__file__, "shard writer"))
def test_settings_that_make_no_sense(tmp_path, setting, message):
    settings = {"path": tmp_path, "split": "train", "vocab_size": 300}
    with pytest.raises(ValueError, match=message):
        ShardWriter(**(settings | setting))


def test_a_full_disk_error_names_the_folder(tmp_path):
    with (
        pytest.raises(OSError, match=f"{tmp_path} cannot be written: No space left.*again"),
        writing(tmp_path),
        open("/dev/full", "wb", buffering=0) as full,
    ):
        full.write(b"x")


def test_existing_folders_stay(tmp_path, write_documents):
    write_documents(tmp_path / "finished", [[1, 2]])
    with pytest.raises(FileExistsError, match="already finished"):
        write_documents(tmp_path / "finished", [[3, 4]])
    assert stored(tmp_path / "finished" / "train" / ALONE / "tokens").tolist() == [1, 2]
    write_documents(tmp_path / "two", [[1, 2]], shards=2)
    with pytest.raises(FileExistsError, match="made of 2 shards, not 3"):
        ShardWriter(tmp_path / "two", "train", shard=1, shards=3, vocab_size=300)
    abandoned(tmp_path / "begun")
    with pytest.raises(FileExistsError, match="was begun with vocab_size 300, not 301"):
        abandoned(tmp_path / "begun", vocab_size=301)
    (folder := tmp_path / "own" / "train" / ALONE).mkdir(parents=True)
    (folder / "thesis.txt").write_text("ten years of work")
    with pytest.raises(FileExistsError, match=r"thesis\.txt"):
        write_documents(tmp_path / "own", [[1, 2]])
    assert (folder / "thesis.txt").exists()
    first = ShardWriter(tmp_path / "locked", "train", vocab_size=300)
    with pytest.raises(FileExistsError, match="another process is writing"):
        ShardWriter(tmp_path / "locked", "train", vocab_size=300)
    first.close()
    ShardWriter(tmp_path / "locked", "train", vocab_size=300).close()
