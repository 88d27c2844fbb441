"""Speed of `data_tools.pretokenize`, compared with `datasets.map` and `tokenizers`.

    python benchmarks/pretokenize.py [--megabytes=150] [--rounds=2]

The text is the Python sources of the standard library and site-packages, as JSON Lines and as
Parquet. The tokenizer is a byte-level BPE of 32,000 ids trained on a part of it. Both paths run as
separate commands with two workers, from the file to ids on disk. They take turns, so that a busy
machine slows both. Processor time covers a command and all its children; memory is their maximum
total. Reads /proc, so it needs Linux.
"""

import itertools
import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorstore as ts
import tokenizers
from absl import app, flags

from data_tools.train_tokenizer.byte_level_bpe import train_byte_level_bpe

_MEGABYTES = flags.DEFINE_integer("megabytes", 150, "Text to encode.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 2, "Turns of both paths for each format.", lower_bound=1)

VOCABULARY, TRAINING_BYTES, WORKERS = 32_000, 20_000_000, 2
SECONDS_BETWEEN_LOOKS = 0.2


@dataclass(frozen=True)
class Cost:
    seconds: float
    cpu_seconds: float
    peak_bytes: int


def texts(total_bytes: int) -> list[str]:
    """Returns source files in random order, repeated until there are enough."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    files = sorted({file for folder in folders for file in Path(folder).rglob("*.py")})
    random.Random(0).shuffle(files)
    found: list[str] = []
    for file in itertools.cycle(files):
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found.append(text)
        total_bytes -= len(text.encode())
        if total_bytes <= 0:
            return found


def training_part(documents: list[str]) -> Iterator[str]:
    sizes = itertools.accumulate(map(len, documents))
    return (text for text, size in zip(documents, sizes, strict=True) if size <= TRAINING_BYTES)


def measure(command: list[str]) -> Cost:
    """Runs `command` to its end and measures it."""
    peak_bytes = 0
    ended = threading.Event()
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    began = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )

    def watch() -> None:
        nonlocal peak_bytes
        while not ended.wait(SECONDS_BETWEEN_LOOKS):
            peak_bytes = max(peak_bytes, sum(map(memory, with_children(process.pid))))

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert process.stderr is not None
    errors = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    ended.set()
    watcher.join()
    if status:
        raise RuntimeError(f"{' '.join(command)} failed:\n{errors}")
    return Cost(seconds, usage.ru_utime + usage.ru_stime, peak_bytes)


def with_children(process: int) -> Iterator[int]:
    yield process
    try:
        for thread in Path(f"/proc/{process}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from with_children(int(child))
    except OSError:  # the process has ended
        return


def memory(process: int) -> int:
    """Returns the bytes that a process holds, including its part of shared memory."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:  # the process has ended
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def our_command(file: Path, tokenizer: Path, out: Path) -> list[str]:
    arguments = {"dataset": file, "tokenizer": tokenizer, "out": out, "workers": WORKERS}
    settings = [f"--{name}={value}" for name, value in arguments.items()]
    return [sys.executable, "-m", "data_tools.pretokenize", *settings]


def our_ids(out: Path) -> np.ndarray:
    """Returns all ids except the two that frame each document, which do not occur in the text."""
    path = out / "train" / "shard_00000_of_00001" / "tokens"
    store = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}
    tokens = ts.open(store).result().read().result()
    return tokens[tokens > 1]


def plain_command(file: Path, tokenizer: Path, out: Path) -> list[str]:
    return [sys.executable, __file__, "plain", str(file), str(tokenizer), str(out)]


def plain(file: str, tokenizer_file: str, out: str) -> None:
    """Tokenizes with `datasets.map` and `tokenizers`."""
    tokenizer = tokenizers.Tokenizer.from_file(tokenizer_file)
    tokenizer.encode_special_tokens = True  # names of special tokens in a text are plain text
    kind = "parquet" if file.endswith(".parquet") else "json"
    rows = datasets.load_dataset(kind, data_files=file, split="train", cache_dir=f"{out}/cache")

    def encode(batch):
        return {"ids": [encoding.ids for encoding in tokenizer.encode_batch(batch["text"])]}

    ids_file = f"{out}/ids.arrow"
    rows.map(
        encode, batched=True, remove_columns="text", num_proc=WORKERS, cache_file_name=ids_file
    )


def plain_ids(out: Path) -> np.ndarray:
    parts = sorted(out.glob("ids_*.arrow"))
    columns = [datasets.Dataset.from_file(str(part)).data.column("ids") for part in parts]
    chunks = [chunk.flatten().to_numpy() for column in columns for chunk in column.chunks]
    return np.concatenate(chunks)


PATHS = {
    "pretokenize": (our_command, our_ids),
    "datasets.map": (plain_command, plain_ids),
}


def compare(file: Path, tokenizer: Path, folder: Path, rounds: int) -> None:
    """Prints a table for one file."""
    costs: dict[str, list[Cost]] = {name: [] for name in PATHS}
    for turn in range(rounds):
        ids = {}
        for name, (command, read_ids) in PATHS.items():
            with tempfile.TemporaryDirectory(dir=folder) as out:
                costs[name].append(measure(command(file, tokenizer, Path(out))))
                ids[name] = read_ids(Path(out))
        if not np.array_equal(*ids.values()):
            raise RuntimeError("the two paths differ in their ids")
        print(f"{file.suffix} round {turn + 1} of {rounds}", flush=True)
    tokens = rounds * len(ids["pretokenize"])
    print(f"{file.suffix:<14}{'tokens/s':>14}{'tokens/CPU-s':>14}{'CPU-s':>8}{'peak MB':>9}")
    per_cpu_second = {}
    for name, each in costs.items():
        seconds = sum(cost.seconds for cost in each)
        cpu_seconds = sum(cost.cpu_seconds for cost in each)
        per_cpu_second[name] = tokens / cpu_seconds
        peak = max(cost.peak_bytes for cost in each) / 1e6
        print(
            f"{name:<14}{tokens / seconds:>14,.0f}{per_cpu_second[name]:>14,.0f}"
            f"{cpu_seconds:>8.1f}{peak:>9,.0f}"
        )
    ratio = per_cpu_second["pretokenize"] / per_cpu_second["datasets.map"]
    print(f"{ratio:.2f} times the tokens per CPU-second, {tokens // rounds:,} equal ids\n")


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        return plain(*arguments[2:])
    documents = texts(_MEGABYTES.value * 1_000_000)
    tokenizer = train_byte_level_bpe(training_part(documents), VOCABULARY)
    load = os.getloadavg()[0]
    print(
        f"{_MEGABYTES.value} MB of Python in {len(documents):,} documents, {WORKERS} workers, "
        f"{len(os.sched_getaffinity(0))} cores, load {load:.1f} before\n"
        f"byte-level BPE of {tokenizer.vocab_size:,} ids, run by {type(tokenizer.encoder).__name__}"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer_file = folder / "tokenizer.json"
        tokenizer_file.write_text(tokenizer.tokenizer_json, encoding="utf-8")
        with open(folder / "text.jsonl", "w", encoding="utf-8") as lines:
            lines.writelines(json.dumps({"text": text}) + "\n" for text in documents)
        pq.write_table(pa.table({"text": documents}), folder / "text.parquet", row_group_size=1000)
        for file in (folder / "text.jsonl", folder / "text.parquet"):
            compare(file, tokenizer_file, folder, _ROUNDS.value)


if __name__ == "__main__":
    app.run(main)
