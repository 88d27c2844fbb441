"""Killed, disturbed, out of space: the same bytes in the end, or an error that says what to do."""

import itertools
import json
import os
import random
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from folder_contents import files_of
from sentinels import sentinels

from data_tools.pretokenize.texts import pretokenize, pretokenize_shard
from data_tools.rows.block import SkippedRows, TextField
from data_tools.rows.files import Files
from data_tools.tokenizer import ByteTokenizer
from data_tools.train_tokenizer.byte_level_bpe import train_byte_level_bpe

REPOSITORY = Path(__file__).parents[2]
FILE_LENGTH = 32 * 1024  # tokens: a journal is written after each

DRIVER = f"""
import sys
from data_tools.pretokenize.texts import pretokenize
from data_tools.rows.files import Files
from data_tools.tokenizer import ByteTokenizer

if __name__ == "__main__":
    source, out, workers = sys.argv[1:]
    print("begun", flush=True)
    pretokenize(
        Files([source]), ByteTokenizer(), out, "train",
        shards=2, workers=int(workers), file_length={FILE_LENGTH}, on_bad_row="skip",
    )
"""


def write_lines(file, total_bytes):
    """JSON Lines of documents of very different lengths, and one bad line in a hundred."""
    rng = random.Random(0)
    written = 0
    with open(file, "w") as lines:
        while written < total_bytes:
            text = chr(97 + rng.randrange(26)) * rng.choice([0, 1, 100, 5_000, 90_000])
            line = json.dumps({"text": text}) + "\n" if rng.randrange(100) else "not JSON\n"
            written += lines.write(line)


def drive(folder, out, workers):
    """The driver on `folder`'s lines.jsonl, once it has begun."""
    (folder / "driver.py").write_text(DRIVER)
    process = subprocess.Popen(
        [sys.executable, "driver.py", "lines.jsonl", out, str(workers)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout.readline() == b"begun\n"
    return process


@pytest.mark.landing
def test_killed_at_random_moments_the_bytes_are_the_same(tmp_path):
    write_lines(tmp_path / "lines.jsonl", 4_000_000)
    begun = time.monotonic()
    whole = drive(tmp_path, "whole", 0)
    assert whole.wait(timeout=120) == 0
    seconds = time.monotonic() - begun

    rng = random.Random()
    killed = 0
    while killed < 5:
        process = drive(tmp_path, "killed", 0)
        try:
            process.wait(timeout=rng.uniform(0, seconds / 4))
            break  # it went to its end before it could be killed
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            killed += 1
    assert drive(tmp_path, "killed", 0).wait(timeout=120) == 0
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")


def test_a_file_that_a_kill_left_without_its_name_does_not_damage_the_next(tmp_path):
    """TensorStore writes to zarr.json.__lock, then renames it."""
    write_lines(tmp_path / "lines.jsonl", 1_000_000)
    target = (Files([str(tmp_path / "lines.jsonl")]), ByteTokenizer())
    settings = {"on_bad_row": "skip", "file_length": FILE_LENGTH}

    def stop(counts, fraction):
        if fraction > 0.5:
            raise KeyboardInterrupt

    def stopped():
        with pytest.raises(KeyboardInterrupt):
            pretokenize(*target, tmp_path / "out", "train", **settings, progress=stop)

    stopped()
    (file,) = (tmp_path / "out").glob("train/*/tokens/zarr.json")
    description = json.loads(file.read_text())
    longer = description | {"shape": [1000 * description["shape"][0]]}
    file.with_name("zarr.json.__lock").write_text(json.dumps(longer))
    stopped()
    pretokenize(*target, tmp_path / "out", "train", **settings)
    pretokenize(*target, tmp_path / "whole", "train", **settings)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def workers_of(process):
    """Returns file descriptors of its children, including Python's own."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) >= 2
    return [os.pidfd_open(int(child)) for child in children]


def assert_ended(workers):
    for worker in workers:
        assert select.select([worker], [], [], 30)[0], "a worker outlived its parent"
        os.close(worker)


def test_workers_end_with_the_killed_process(tmp_path):
    write_lines(tmp_path / "lines.jsonl", 30_000_000)
    process = drive(tmp_path, "out", 2)
    journal = tmp_path / "out" / "train" / "shard_00000_of_00002" / "journal.json"
    while not (journal.exists() and json.loads(journal.read_text())["written"]):
        assert process.poll() is None
    workers = workers_of(process)
    process.kill()
    process.wait()
    assert_ended(workers)


KILLED_WHILE_SENDING = """
import os, signal, threading
from data_tools.encoding import encode_in_order
from data_tools.rows.source import Texts

def kill():
    children = f"/proc/{os.getpid()}/task/{os.getpid()}/children"
    while len(open(children).read().split()) < 2:  # Python's own is one of them
        pass
    os.kill(os.getpid(), signal.SIGKILL)

class Recipe:
    def __getstate__(self):
        threading.Thread(target=kill).start()
        return {"large": bytes(10**8)}  # more than a pipe holds

if __name__ == "__main__":
    list(encode_in_order(Texts(["a"]).blocks(0, 1), Recipe(), 1))
"""


@pytest.mark.landing
def test_workers_of_a_killed_process_say_nothing(tmp_path):
    """Whatever they were reading of it."""
    driver = tmp_path / "driver.py"
    driver.write_text(KILLED_WHILE_SENDING)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(driver)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")


@pytest.mark.slow
def test_the_same_bytes_for_any_number_of_workers(tmp_path):
    write_lines(tmp_path / "lines.jsonl", 4_000_000)
    source = Files([str(tmp_path / "lines.jsonl")])
    tokenizer = train_byte_level_bpe(["a" * 300, "some words and others"], 270)
    settings = {"on_bad_row": "skip", "max_tokens": 300_000}
    for workers in (0, 1, 3):
        out = tmp_path / str(workers)
        pretokenize(source, tokenizer, out, "train", workers=workers, **settings)
    assert files_of(tmp_path / "0") == files_of(tmp_path / "1") == files_of(tmp_path / "3")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_row_is_fatal_or_skipped_and_counted(tmp_path, workers, capsys):
    """Ten are shown."""
    file = tmp_path / "lines.jsonl"
    file.write_bytes(
        b'{"text": "one"}\n{"text": 2}\n{"body": "three"}\n{"text": "\\ud800"}\n'
        b'{"text": "five"}\n\n{"text": "\xff"}\nsix\n{"text": ""}\n' + b"x\n" * 12
    )
    target = (Files([str(file)]), ByteTokenizer(), tmp_path / "out", "train")
    with pytest.raises(ValueError, match=r"lines\.jsonl, line 2, has no string.*--on_bad_row=skip"):
        pretokenize_shard(*target, workers=workers)
    skipped = SkippedRows()
    metadata = pretokenize(*target, workers=workers, on_bad_row="skip", skipped=skipped)
    assert (metadata.documents, metadata.skipped_rows) == (3, 5 + 12)
    *shown, last = capsys.readouterr().err.splitlines()
    lines = (2, 3, 4, 7, 8, *range(10, 15))
    assert [line.split(", ")[1] for line in shown] == [f"line {n}" for n in lines]
    assert last == "further skipped rows are not shown"
    assert metadata.bytes == len("onefive")


def test_a_changed_source_cannot_go_on(tmp_path):
    file = tmp_path / "lines.jsonl"
    good = json.dumps({"text": "a" * 2**20}) + "\n"  # a block of its own
    file.write_text(2 * good + "not JSON\n")
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="line 3"):
        pretokenize(Files([str(file)]), ByteTokenizer(), out, "train", file_length=FILE_LENGTH)
    file.write_text('{"text": "a"}\n{"text": "b"}\n')
    with pytest.raises(FileExistsError, match=r"was begun with source bytes \d+, not 28: give"):
        pretokenize(Files([str(file)]), ByteTokenizer(), out, "train", file_length=FILE_LENGTH)


@pytest.mark.slow
def test_a_document_of_100_megabytes(tmp_path):
    text = "a line of ordinary text, and then some more of it\n" * 2_000_000
    (tmp_path / "lines.jsonl").write_text(
        "".join(json.dumps({"text": t}) + "\n" for t in ("before", text, "after"))
    )
    source = Files([str(tmp_path / "lines.jsonl")])
    metadata = pretokenize(source, ByteTokenizer(), tmp_path / "out", "train", workers=1)
    assert metadata.documents == 3
    assert metadata.tokens == len("before" + text + "after") + 6


def test_interrupted_between_blocks_the_bytes_are_the_same(tmp_path):
    write_lines(tmp_path / "lines.jsonl", 6_000_000)  # six blocks
    target = (Files([str(tmp_path / "lines.jsonl")]), ByteTokenizer())
    settings = {"on_bad_row": "skip", "file_length": FILE_LENGTH}
    for _ in range(2):
        blocks = itertools.count(1)

        def progress(counts, fraction, blocks=blocks):
            if next(blocks) == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pretokenize(*target, tmp_path / "out", "train", progress=progress, **settings)
    pretokenize(*target, tmp_path / "out", "train", **settings)
    pretokenize(*target, tmp_path / "whole", "train", **settings)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_a_full_disk_is_named_and_nothing_is_lost(tmp_path):
    write_lines(tmp_path / "lines.jsonl", 1_000_000)
    target = (Files([str(tmp_path / "lines.jsonl")]), ByteTokenizer())
    settings = {"on_bad_row": "skip", "file_length": 8 * FILE_LENGTH}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        with pytest.raises(OSError, match=r"shard_00000_of_00001/tokens cannot be written.*again"):
            pretokenize(*target, tmp_path / "out", "train", **settings)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    pretokenize(*target, tmp_path / "out", "train", **settings)
    pretokenize(*target, tmp_path / "whole", "train", **settings)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


@pytest.mark.slow
def test_a_lost_worker_is_an_error_and_the_run_goes_on(tmp_path, monkeypatch):
    write_lines(tmp_path / "lines.jsonl", 3_000_000)
    lost = tmp_path / "lost"
    (tmp_path / "losing_worker.py").write_text(
        "import os\n"
        "def text(row):\n"
        f"    if len(row['text']) == 90_000 and not os.path.exists({str(lost)!r}):\n"
        f"        open({str(lost)!r}, 'w').close()\n"
        "        os.kill(os.getpid(), 9)\n"
        "    return row['text']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    field = TextField(function="losing_worker:text")
    target = (Files([str(tmp_path / "lines.jsonl")], field=field), ByteTokenizer())
    settings = {"workers": 2, "on_bad_row": "skip", "file_length": FILE_LENGTH}
    with pytest.raises(ChildProcessError, match=r"worker process was killed.*again to continue"):
        pretokenize(*target, tmp_path / "out", "train", **settings)
    pretokenize(*target, tmp_path / "out", "train", **settings)
    pretokenize(*target, tmp_path / "whole", "train", **settings)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


@pytest.mark.landing
@pytest.mark.parametrize(
    "number", sentinels([signal.SIGINT, signal.SIGTERM], lambda number: number == signal.SIGTERM)
)
def test_a_signal_ends_all_even_stuck_workers(tmp_path, number):
    """The signal goes to all processes at once, like Ctrl-C and signals of batch systems."""
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    (tmp_path / "sticking.py").write_text(
        f"def text(row):\n    open({str(begun)!r}, 'w').close()\n    while True: pass\n"
    )
    (tmp_path / "lines.jsonl").write_text('{"text": "a"}\n')
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "data_tools.pretokenize", "--tokenizer=bytes", "--workers=2"),
            *(f"--dataset={tmp_path / 'lines.jsonl'}", f"--out={tmp_path / 'out'}"),
            "--text_function=sticking:text",
        ],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": f"{REPOSITORY}:{tmp_path}"},
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    begun.read_text()  # waits for the worker
    workers = workers_of(process)
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert errors == f"pretokenize: {number.name}; run the same command to continue\n"
    assert_ended(workers)
