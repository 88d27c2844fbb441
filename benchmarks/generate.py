"""Speed of generation on this machine, compared with transformers and its static cache.

    python benchmarks/generate.py                                  # on a CPU, about 15 minutes
    python benchmarks/generate.py --sizes=10m --rows=1 --peers=    # only lmlib

Prompts of 512 tokens are continued greedily by 64 tokens. The models are random Llamas (135m has
the shape of SmolLM2 135M, 1b of Llama 3.2 1B; `tiny` is for tests). All contenders read the same
Hugging Face folder and must generate the same tokens; otherwise the script fails. They take turns;
the first turn compiles and is not counted. Values are medians of tokens per second over all rows.
For one row, the table also shows the decoding speed as a fraction of the memory limit: the rate at
which XLA reads numbers to sum them, divided by the weights' bytes.
"""

import functools
import importlib.util
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags, logging

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # see benchmarks/train_step.py

import jax
from step_peers.measure import machine

from lmlib import hf
from lmlib.compute import Compute
from lmlib.generate import GREEDY, Generator
from lmlib.models.families.llama import llama
from lmlib.terminal.table import columns
from runner.jax_settings.devices import choose_devices

SIZES = {
    "tiny": dict(vocab=256, embed=64, layers=2, heads=2, mlp=128, tied=True),
    "10m": dict(vocab=8_192, embed=320, layers=6, heads=5, mlp=864, tied=True),
    "135m": dict(vocab=49_152, embed=576, layers=30, heads=9, kv_heads=3, mlp=1_536, tied=True),
    "1b": dict(
        vocab=128_256, embed=2_048, layers=16, heads=32, kv_heads=8, mlp=8_192, tied=True
    ),  # Llama 3.2 1B's
}
PEERS = "transformers", "transformers_compiled"
PROMPT, NEW = 512, 64  # tokens

_SIZES = flags.DEFINE_list("sizes", ["10m", "135m"], f"Sizes: {', '.join(SIZES)}.")
_ROWS = flags.DEFINE_list("rows", ["1", "16"], "Prompts per batch.")
_PEERS = flags.DEFINE_list("peers", list(PEERS), f"Peers: {', '.join(PEERS)}.")
_PRECISION = flags.DEFINE_enum("precision", "float32", ["float32", "bfloat16"], "Precision of all.")
_TURNS = flags.DEFINE_integer(
    "turns", 5, "Turns of each contender, after the first.", lower_bound=1
)


Prompts = list[list[int]]


class Lmlib:
    """lmlib's generator."""

    def __init__(self, folder: Path, prompts: Prompts):
        self._prompts = prompts
        self._generator = Generator(
            hf.load(folder),
            compute=Compute(dtype=_PRECISION.value),
            rows=len(prompts),
            length=PROMPT + NEW + 1,
        )

    def prefill(self) -> None:
        """Computes the prompts and the first token after each."""
        self._stream = self._generator.stream(self._prompts, NEW + 1, GREEDY, round=NEW)
        next(self._stream)

    def decode(self) -> Prompts:
        """Generates `NEW` more tokens for each prompt; returns all generated tokens."""
        return [row.tokens for row in self._stream.finish()]


class Transformers:
    """transformers with its static cache, in a loop without the overhead of `generate`."""

    def __init__(self, folder: Path, prompts: Prompts, compiled: bool):
        import torch
        import transformers

        self._torch, self._new_cache = torch, transformers.StaticCache
        on_gpu = jax.default_backend() == "gpu"
        torch.set_default_device("cuda" if on_gpu else "cpu")
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=_PRECISION.value, attn_implementation="sdpa"
        ).eval()
        self._step = self._model
        if compiled:  # on a GPU with CUDA graphs, as transformers recommends
            mode = "reduce-overhead" if on_gpu else "default"
            self._step = torch.compile(self._model, dynamic=False, mode=mode)
        self._prompts = torch.tensor(prompts)
        # CUDA graphs need the same cache in each turn.
        self._cache = self._new_cache(config=self._model.config, max_cache_len=PROMPT + NEW + 1)

    def prefill(self) -> None:
        self._cache.reset()
        self._made = [self._next(self._prompts, self._torch.arange(PROMPT))]
        self._made[0].tolist()  # waits for it

    def decode(self) -> Prompts:
        for n in range(NEW):
            at = self._torch.tensor([PROMPT + n])
            self._made.append(self._next(self._made[-1], at))
        return self._torch.cat(self._made, dim=1).tolist()

    def _next(self, tokens_BS: Any, at_S: Any) -> Any:
        with self._torch.no_grad():
            output = self._step(
                input_ids=tokens_BS,
                past_key_values=self._cache,
                position_ids=at_S[None].expand(len(tokens_BS), -1),
                use_cache=True,
                logits_to_keep=1,
            )
            return output.logits[:, -1].argmax(dim=-1, keepdim=True)


CONTENDERS = {
    "lmlib": Lmlib,
    "transformers": functools.partial(Transformers, compiled=False),
    "transformers_compiled": functools.partial(Transformers, compiled=True),
}


def reading_rate() -> float:
    """Returns the bytes per second at which XLA reads memory to sum numbers, on all cores."""
    few = jax.default_backend() == "cpu"  # a GPU would read them sooner than it can be asked to
    numbers = jax.numpy.ones(2**26 if few else 2**30, "float32")
    total = jax.jit(jax.numpy.sum).lower(numbers).compile()
    total(numbers).block_until_ready()
    began = time.perf_counter()
    for _ in range(3):
        total(numbers).block_until_ready()
    return 3 * numbers.nbytes / (time.perf_counter() - began)


def measured(size: str, rows: int, folder: Path, names: Sequence[str]) -> str | None:
    """Prints a table. Returns a line with the contenders whose tokens differ, if any."""
    model = llama(**SIZES[size], key=jax.random.key(0))
    count = sum(weight.size for weight in jax.tree.leaves(model))
    if not folder.exists():
        hf.save(model, folder, model_type="llama", dtype="float32", longest=2 * PROMPT)
    random.seed(0)
    prompts = [[random.randrange(model.vocab) for _ in range(PROMPT)] for _ in range(rows)]
    contenders = {name: CONTENDERS[name](folder, prompts) for name in names}
    # Seconds of prefill and of decoding in each turn except the first, which compiles.
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
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
        sys.exit(f"unknown argument {arguments[1]!r}; options begin with --, see --help")
    logging.set_verbosity(logging.WARNING)
    choose_devices()
    peers = [name for name in _PEERS.value if name]
    for flag, names, known in (("peers", peers, PEERS), ("sizes", _SIZES.value, SIZES)):
        if unknown := set(names) - set(known):
            sys.exit(f"--{flag}={unknown.pop()} is not known; choose from {', '.join(known)}")
    if peers and None in map(importlib.util.find_spec, ("torch", "transformers")):
        print("transformers: not installed, or PyTorch (pip install 'lmlib[parity]')")
        peers = []
    if peers and jax.default_backend() == "gpu":
        import torch

        if not torch.cuda.is_available():
            print(f"transformers: PyTorch {torch.__version__} sees no GPU; install its CUDA build")
            peers = []
    print(machine())
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
