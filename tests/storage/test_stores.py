"""Folders on a disk and in a bucket follow the `Store` interface, with any network fault."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from buckets.fixtures import SCHEMES, folder_in_bucket
from buckets.proxy import Fault, FaultyProxy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentinels import sentinels

from lmlib.storage.bucket.failures import BucketError, lasting
from lmlib.storage.bucket.store import BucketStore, Patience
from lmlib.storage.bucket.url import BucketUrl
from lmlib.storage.store import FolderStore, Store

QUICK = Patience(answer=0.5, first_delay=0.01, longest_delay=0.05, total=20.0)
SHORT = Patience(answer=0.3, first_delay=0.01, longest_delay=0.02, total=0.5)


@pytest.fixture(params=SCHEMES)
def store(request, monkeypatch) -> Iterator[BucketStore]:
    with folder_in_bucket(request.param, monkeypatch) as (url, _):
        yield BucketStore(BucketUrl.parsed(url))


@pytest.fixture(params=SCHEMES)
def bucket(request, monkeypatch) -> Iterator[tuple[BucketStore, FaultyProxy]]:
    with folder_in_bucket(request.param, monkeypatch) as (url, proxy):
        yield BucketStore(BucketUrl.parsed(url), QUICK), proxy


def test_written_files_are_read_listed_and_deleted(store):
    store.write("model.norm/0.0", b"0123456789")
    store.write("model.norm/.zarray", b"{}")
    store.write("notes", b"old")
    store.write("notes", b"new")
    check_reading(store)
    store.delete("notes")
    store.delete("notes")
    assert "notes" not in store.list()
    for read in (lambda: store.read("notes"), lambda: list(store.pieces("notes"))):
        with pytest.raises(FileNotFoundError):
            read()


def test_a_folder_is_read_as_a_bucket_is(tmp_path):
    (tmp_path / "model.norm").mkdir()
    (tmp_path / "model.norm/0.0").write_bytes(b"0123456789")
    (tmp_path / "model.norm/.zarray").write_bytes(b"{}")
    (tmp_path / "notes").write_bytes(b"new")
    check_reading(FolderStore(tmp_path))


def check_reading(store: Store) -> None:
    assert store.read("notes") == b"new"
    assert store.read("model.norm/0.0", 2, 5) == b"234"
    assert store.read("model.norm/0.0", 8, 20) == b"89"
    assert set(store.list()) == {"model.norm/0.0", "model.norm/.zarray", "notes"}
    assert set(store.list("model.norm")) == {"model.norm/0.0", "model.norm/.zarray"}
    into = bytearray(12)
    assert b"".join(map(bytes, store.pieces("model.norm/0.0", memoryview(into)))) == b"0123456789"
    assert into == b"0123456789\0\0"
    for read in (lambda: store.read("absent"), lambda: list(store.pieces("absent"))):
        with pytest.raises(FileNotFoundError):
            read()


def test_one_of_many_conditional_writes_succeeds(store):
    with ThreadPoolExecutor(8) as threads:
        wrote = list(threads.map(lambda i: store.write_if_absent("lock", b"%d" % i), range(8)))
    assert wrote.count(True) == 1
    assert store.read("lock") == b"%d" % wrote.index(True)


@pytest.mark.slow
@pytest.mark.parametrize("struck", [range(1, 2), range(4)], ids=["one", "each"])
def test_every_fault_of_a_request_is_survived(bucket, struck):
    store, proxy = bucket
    for fault in (each for each in Fault if each is not Fault.FORBIDDEN):
        for first in struck:  # of the requests of `write_if_absent`: the write is the second
            strike = len(proxy.requests) + first
            proxy.fault = lambda request, fault=fault, strike=strike: (
                fault if request.number == strike else None
            )
            name, content = f"{fault.name}/{first}", f"{fault} {first}".encode() * 100
            assert store.write_if_absent(name, content), (fault, first)
            assert not store.write_if_absent(name, b"another"), (fault, first)
            assert store.read(name) == content
            store.write(name, b"whole")
            assert store.read(name) == b"whole"
            assert f"{fault.name}/{first}" in store.list()


@pytest.mark.slow
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_store_behind_faults_is_a_dictionary(data, bucket):
    store, proxy = bucket
    faults = [each for each in Fault if each not in (Fault.FORBIDDEN, Fault.TIMED_OUT)]
    struck = data.draw(st.dictionaries(st.integers(0, 30), st.sampled_from(faults), max_size=10))
    came = len(proxy.requests)
    proxy.fault = lambda request: struck.get(request.number - came)
    kept = {name: None for name in store.list()}
    for name in kept:
        store.delete(name)
    expected: dict[str, bytes] = {}
    serial = itertools.count()
    for _ in range(data.draw(st.integers(1, 8))):
        name = data.draw(st.sampled_from(["a", "a/b", "c"]))
        content = b"content %d" % next(serial)
        match data.draw(st.sampled_from(["write", "write if absent", "delete"])):
            case "write":
                store.write(name, content)
                expected[name] = content
            case "write if absent":
                assert store.write_if_absent(name, content) == (name not in expected)
                expected.setdefault(name, content)
            case "delete":
                store.delete(name)
                expected.pop(name, None)
    assert {name: store.read(name) for name in store.list()} == expected


@pytest.mark.parametrize(
    "fault, told",
    sentinels(
        [
            (Fault.UNAVAILABLE, "the server fails"),
            (Fault.THROTTLED, "the server asks for fewer requests"),
            (Fault.REFUSED, "the server cannot be reached"),
            (Fault.TIMED_OUT, "no answer came"),
            (Fault.FORBIDDEN, "permission is denied"),
        ],
        lambda case: case[0] is Fault.FORBIDDEN,
        landing=lambda case: case[0] is Fault.REFUSED,
    ),
)
def test_a_lasting_fault_is_reported_in_one_sentence(bucket, fault, told):
    store = BucketStore(bucket[0].url, SHORT)
    bucket[1].fault = lambda request: fault
    for act in (
        lambda: store.read("file"),
        lambda: store.write("file", b"content"),
        lambda: store.write_if_absent("file", b"content"),
        lambda: store.list(),
        lambda: store.delete("file"),
    ):
        with pytest.raises(BucketError, match=told) as caught:
            act()
        text = str(caught.value)
        assert str(store.url) in text and "\n" not in text and len(text) < 300
        assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_an_absent_bucket_is_named(bucket):
    url = BucketUrl(bucket[0].url.scheme, "absent-bucket", "run")
    with pytest.raises(BucketError, match=r"absent-bucket/run/file: the bucket does not exist"):
        BucketStore(url, SHORT).write("file", b"content")


@pytest.mark.parametrize(
    "code, told",
    [
        ("ExpiredToken", "the credentials have expired"),
        ("InvalidAccessKeyId", "the credentials are not valid"),
        ("SignatureDoesNotMatch", "the credentials are not valid"),
        ("AccessDenied", "permission is denied"),
    ],
)
def test_messages_about_credentials_hold_no_secret(code, told):
    """S3 answers so: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html."""
    answer = (
        f"PERMISSION_DENIED: {code}: see there [http_response_code='403'] [http_response_body="
        "'<AWSAccessKeyId>AKIASECRET</AWSAccessKeyId><StringToSign>secret</StringToSign>']"
    )
    _, cause = lasting(answer)
    assert told in cause and "SECRET" not in cause.upper().replace("SECRETS", "")


def test_odd_urls_are_refused():
    for text in ("gs://", "s3://B/run", "gs://bucket/a/../b", "s3://bucket/a//b", "gs://b k/x"):
        with pytest.raises(ValueError):
            if BucketUrl.parsed(text) is None:
                raise ValueError("no URL of a bucket")
    assert str(BucketUrl.parsed("gs:/bucket/run/")) == "gs://bucket/run"
    assert BucketUrl.parsed("az://bucket/run") is None
