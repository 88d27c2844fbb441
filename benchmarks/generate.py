"""Speed of generation on this machine, beside transformers with its static cache.

    python benchmarks/generate.py                                  # on a CPU, about 15 minutes
    python benchmarks/generate.py --sizes=10m --rows=1 --peers=    # lmlib alone

Prompts of 512 tokens, continued greedily by 64, in rows of 1 and 16, by random models of Llama's
architecture with 10 and 135 million parameters (the latter has the shape of SmolLM2 135M; `tiny` is
for tests). Whoever takes part reads the same folder of Hugging Face's and must make the same
tokens, else the script says who does not and fails; in float32 ties of the likeliest are too rare
to matter.

Contenders take turns, the first of which compiles and is not counted; figures are medians of tokens
per second, of all rows together. Every token of a row takes all weights once through memory: beside
the decoding of one row stands its share of what the memory allows, which is the rate at which XLA
reads numbers to add them up, measured between the turns, over the bytes of the weights.
"""

import importlib.util
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags, logging

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # see benchmarks/train_step.py

import jax
from generate_peers.contender import NEW, PROMPT, Contender, Work
from generate_peers.lmlib_peer import Lmlib, reading_rate
from step_peers.machine import cpu_name, versions

from lmlib import hf
from lmlib.models.families.llama import llama
from lmlib.terminal.table import columns

SIZES = {
    "tiny": dict(vocab=256, embed=64, layers=2, heads=2, mlp=128, tied=True),
    "10m": dict(vocab=8_192, embed=320, layers=6, heads=5, mlp=864, tied=True),
    "135m": dict(vocab=49_152, embed=576, layers=30, heads=9, kv_heads=3, mlp=1_536, tied=True),
}
PEERS = ("transformers", "transformers_compiled")

_SIZES = flags.DEFINE_list("sizes", ["10m", "135m"], f"Of {', '.join(SIZES)}.")
_ROWS = flags.DEFINE_list("rows", ["1", "16"], "Prompts together.")
_PEERS = flags.DEFINE_list("peers", list(PEERS), f"Of {', '.join(PEERS)}.")
_PRECISION = flags.DEFINE_enum("precision", "float32", ["float32", "bfloat16"], "Of all.")
_TURNS = flags.DEFINE_integer("turns", 5, "Of each contender, after the first.", lower_bound=1)


def make(name: str, work: Work) -> Contender:
    if name == "lmlib":
        return Lmlib(work, _PRECISION.value)
    from generate_peers.transformers_peer import Transformers

    return Transformers(work, _PRECISION.value, compiled=name == "transformers_compiled")


def in_turns(
    contenders: dict[str, Contender],
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, list[list[int]]], list[float]]:
    """Seconds of prefill and decoding for each turn, the tokens made, and rates of reading."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    made, rates = {}, []
    for turn in range(_TURNS.value + 1):
        rates.append(reading_rate())
        for name, contender in contenders.items():
            began = time.perf_counter()
            contender.prefill()
            between = time.perf_counter()
            made[name] = contender.decode()
            if turn > 0:
                seconds[name].append((between - began, time.perf_counter() - between))
    return seconds, made, rates


def measured(size: str, rows: int, folder: Path, names: Sequence[str]) -> str | None:
    """Prints a table; who did other work, if someone did."""
    model = llama(**SIZES[size], key=jax.random.key(0))
    count = sum(weight.size for weight in jax.tree.leaves(model))
    if not folder.exists():
        hf.save(model, folder, model_type="llama", dtype="float32", longest=2 * PROMPT)
    random.seed(0)
    prompts = tuple(
        tuple(random.randrange(model.vocab) for _ in range(PROMPT)) for _ in range(rows)
    )
    work = Work(size, folder, prompts)
    seconds, made, rates = in_turns({name: make(name, work) for name in names})
    weight_bytes = count * {"float32": 4, "bfloat16": 2}[_PRECISION.value]
    steps_allowed = statistics.median(rates) / weight_bytes

    def rate(name: str, part: int, tokens: int) -> float:
        return statistics.median(rows * tokens / each[part] for each in seconds[name])

    head = ["", "prefill, tokens/s", "lmlib ÷ it", "decoding, tokens/s", "lmlib ÷ it"]
    table = [head if rows > 1 else [*head, "of what memory allows"]]
    for name in names:
        prefill, decode = rate(name, 0, PROMPT), rate(name, 1, NEW)
        row = [name, f"{prefill:,.0f}", f"{rate('lmlib', 0, PROMPT) / prefill:.2f}"]
        row += [f"{decode:,.1f}", f"{rate('lmlib', 1, NEW) / decode:.2f}"]
        table.append(row if rows > 1 else [*row, f"{decode / steps_allowed:.2f}"])
    print(
        f"\n{size}: {count / 1e6:,.1f} M parameters, {rows} × {PROMPT} tokens and {NEW} more, "
        f"{_PRECISION.value}; memory is read at {statistics.median(rates) / 1e9:.1f} GB/s"
    )
    print(columns(table), flush=True)
    others = [name for name in names if made[name] != made["lmlib"]]
    return (
        f"{size}, {rows} rows: other tokens than lmlib's: {', '.join(others)}" if others else None
    )


def main(arguments: Sequence[str]) -> None:
    if arguments[1:]:
        sys.exit(f"what is {arguments[1]!r}? Options begin with --; see --help")
    logging.set_verbosity(logging.WARNING)
    peers = [name for name in _PEERS.value if name]
    if unknown := [name for name in peers if name not in PEERS]:
        sys.exit(f"--peers={unknown[0]} is not known; choose from {', '.join(PEERS)}")
    if unknown := [name for name in _SIZES.value if name not in SIZES]:
        sys.exit(f"--sizes={unknown[0]} is not known; choose from {', '.join(SIZES)}")
    if peers and None in map(importlib.util.find_spec, ("torch", "transformers")):
        print("transformers: not installed, or PyTorch (pip install 'lmlib[parity]')")
        peers = []
    print(f"{os.cpu_count()} × {cpu_name()}, {versions()}")
    with tempfile.TemporaryDirectory() as folder:
        problems = [
            measured(size, int(rows), Path(folder, size), ["lmlib", *peers])
            for size in _SIZES.value
            for rows in _ROWS.value
        ]
    if failures := [problem for problem in problems if problem]:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    app.run(main)
