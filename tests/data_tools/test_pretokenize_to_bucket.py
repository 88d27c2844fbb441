"""A data set whose folder is in a bucket: shards are made here, and sent when they are whole."""

import json
import os
import signal

import numpy as np
import pytest
from buckets.fixtures import SCHEMES, folder_in_bucket
from buckets.proxy import Fault
from folder_contents import files_of
from forked_processes import SECONDS, ForkedProcess, run_forked
from sentinels import sentinels

from data_tools.pretokenize.texts import pretokenize, pretokenize_shard
from data_tools.rows.files import Files
from data_tools.tokenizer import ByteTokenizer
from data_tools.train_tokenizer.byte_level_bpe import train_byte_level_bpe
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.stored.metadata import read_split
from lmlib.storage.bucket.copies import place_to_make
from lmlib.storage.bucket.failures import BucketError
from lmlib.storage.bucket.store import BucketStore
from lmlib.storage.bucket.url import BucketUrl

TEXTS = [f"text number {number} " * (number % 7) for number in range(300)]
SHARDS = 2


@pytest.fixture(params=[pytest.param("s3", marks=pytest.mark.landing), "gs"])
def bucket(request, monkeypatch, tmp_path):
    assert request.param in SCHEMES
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with folder_in_bucket(request.param, monkeypatch) as found:
        yield found


def objects_of(url):
    store = BucketStore(BucketUrl.parsed(url))
    return {name: store.read(name) for name in store.list()}


def made_here(url):
    return files_of(place_to_make(BucketUrl.parsed(url)))


@pytest.fixture
def texts(tmp_path):
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    (tmp_path / "texts.jsonl").write_text("".join(lines))
    return Files([str(tmp_path / "texts.jsonl")])


def on_disk(texts, folder, tokenizer):
    pretokenize(texts, tokenizer, folder, "train", shards=SHARDS)
    return files_of(folder)


def fails_from(number, before):
    """The proxy's answers: permission is denied from one upload on."""
    uploads = []

    def fault(request):
        if request.method in ("PUT", "POST") and request.number >= before:
            uploads.append(request)
        return Fault.FORBIDDEN if len(uploads) > number else None

    return fault


@pytest.mark.landing
def test_the_objects_are_the_files_of_a_disk(bucket, texts, tmp_path):
    url, _ = bucket
    tokenizer = train_byte_level_bpe(TEXTS, 300)
    made = pretokenize(texts, tokenizer, url, "train", shards=SHARDS)
    assert objects_of(url) == on_disk(texts, tmp_path / "data", tokenizer)
    assert made == read_split(tmp_path / "data" / "train")
    # Nothing large stays here after it was sent.
    left = {name.rpartition("/")[2] for name in made_here(url)}
    assert left == {"tokenizer.json", "metadata.json"}
    batch, same = (
        FlatTokens(path, "train", 4, 32).batch(3) for path in (url, str(tmp_path / "data"))
    )
    np.testing.assert_array_equal(batch.tokens, same.tokens)


@pytest.mark.parametrize("uploads", sentinels([0, 1, 9, 19], (9).__eq__))
def test_unsent_metrics_are_sent_by_the_next_start(bucket, texts, tmp_path, uploads):
    url, proxy = bucket
    proxy.fault = fails_from(uploads, len(proxy.requests))
    with pytest.raises(BucketError, match="permission is denied"):
        pretokenize(texts, ByteTokenizer(), url, "train", shards=SHARDS)
    with pytest.raises(FileNotFoundError):
        proxy.fault = lambda request: None
        FlatTokens(url, "train", 4, 32)
    pretokenize(texts, ByteTokenizer(), url, "train", shards=SHARDS)
    assert objects_of(url) == on_disk(texts, tmp_path / "data", ByteTokenizer())


@pytest.mark.parametrize("uploads", sentinels([0, 5, 9, 17], landing=(9).__eq__))
def test_a_command_that_is_killed_while_it_sends_goes_on(bucket, texts, tmp_path, uploads):
    url, proxy = bucket
    before, sent = len(proxy.requests), []
    dataset = f"--dataset={tmp_path / 'texts.jsonl'}"
    command = ("-m", "data_tools.pretokenize", dataset, "--split=train")
    command += ("--tokenizer=bytes", f"--shards={SHARDS}", f"--out={url}")
    with open(tmp_path / "shown", "wb") as shown:
        process = ForkedProcess(*command, stdout=shown, stderr=shown)

        def kill(request):
            if request.method in ("PUT", "POST") and request.number >= before:
                sent.append(request)
                if len(sent) == uploads + 1:
                    os.kill(process.pid, signal.SIGKILL)

        proxy.fault = kill
        status = process.wait(SECONDS)
    assert status == -signal.SIGKILL, (tmp_path / "shown").read_text()
    proxy.fault = lambda request: None
    ended = run_forked(*command)
    assert ended.returncode == 0, ended.stderr
    assert objects_of(url) == on_disk(texts, tmp_path / "data", ByteTokenizer())


@pytest.mark.landing
def test_machines_share_the_shards(bucket, texts, tmp_path, monkeypatch):
    """Each has a cache of its own."""
    url, _ = bucket
    for shard in range(SHARDS):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"machine_{shard}"))
        target = (texts, ByteTokenizer(), url, "train")
        pretokenize_shard(*target, shard=shard, shards=SHARDS)
    assert objects_of(url) == on_disk(texts, tmp_path / "data", ByteTokenizer())
    before = objects_of(url)
    with pytest.raises(FileExistsError, match=rf"^{url}/train/shard_00000_of_00002 is finished"):
        pretokenize(texts, ByteTokenizer(bos=False), url, "train", shards=SHARDS)
    with pytest.raises(FileExistsError, match="the split is made of 2 shards, not 3"):
        pretokenize_shard(*target, shard=0, shards=3)
    assert objects_of(url) == before


@pytest.mark.landing
def test_a_shard_that_was_deleted_there_is_made_again(bucket, texts, tmp_path):
    url, _ = bucket
    pretokenize(texts, ByteTokenizer(), url, "train", shards=SHARDS)
    store = BucketStore(BucketUrl.parsed(url))
    for name in store.list("train/shard_00001_of_00002"):
        store.delete(name)
    pretokenize(texts, ByteTokenizer(), url, "train", shards=SHARDS)
    assert objects_of(url) == on_disk(texts, tmp_path / "data", ByteTokenizer())


@pytest.mark.landing
def test_the_command_ends_with_one_that_trains_on_it(bucket, tmp_path):
    url, _ = bucket
    (tmp_path / "text").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "text" / f"{number}.txt").write_text(text)
    command = ("-m", "data_tools.pretokenize", f"--dataset={tmp_path / 'text'}", "--split=train")
    more = ("--tokenizer=bytes", "--validation_fraction=0.2", f"--out={url}")
    ended = run_forked(*command, *more)
    assert ended.returncode == 0, ended.stderr
    assert f"folder            {url}/train\n" in ended.stdout
    assert f"--fdl.tokens={url} --workdir={url}_run" in ended.stdout
    shown = run_forked("-m", "data_tools.inspect", url, "--verify")
    assert shown.returncode == 0, shown.stderr
    assert f"{url}/validation: all data is whole" in shown.stdout
