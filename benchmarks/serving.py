"""Measures serving on one core beside loops over single requests, and beside transformers.

    taskset -c 0 python benchmarks/serving.py                      # about 30 minutes
    python benchmarks/serving.py --served=10m --beside=            # only lmlib

Models have random weights (`10m` is small, `135m` has the shape of SmolLM2 135M; `tiny` is for
tests). Each contender answers the same prompts greedily, as many at once as the table says; all
must make the same tokens, or the script fails. They take turns; the first turn compiles and is not
counted. Values are medians of generated tokens per CPU-second, including the prompts.

- engine: `lmlib.serve.Engine`, with equal bits for every mixture of requests
- loop: `lmlib.generate.Generator`, one request after the other
- generate: `model.generate` of transformers, one request after the other
- continuous: `model.generate_batch` of transformers, the machinery of `transformers serve`

The second table has the CPU-seconds until a short prompt's first token, while prompts of 2,000
tokens arrive, and while none does.
"""

import importlib.util
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags, logging

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # see benchmarks/train_step.py

import jax
from generate import SIZES
from step_peers.measure import machine

from lmlib import hf
from lmlib.compute import Compute
from lmlib.generate import GREEDY, Generator
from lmlib.models.families.llama import llama
from lmlib.serve.engine import Answer, Engine
from lmlib.serve.requests import Request, Update
from lmlib.terminal.table import columns
from runner.jax_settings.devices import choose_devices

PEERS = "generate", "continuous"
PROMPT, NEW, LENGTH = 64, 64, 2_048  # tokens
LONG = 2_000
ONE_BY_ONE = "loop", "generate"
_FEW = 2  # requests of these in a turn

_SERVED = flags.DEFINE_list("served", ["10m", "135m"], f"Sizes: {', '.join(SIZES)}.")
_AT_ONCE = flags.DEFINE_list("at_once", ["1", "4", "16"], "Concurrent requests.")
_BESIDE = flags.DEFINE_list("beside", list(PEERS), f"Peers: {', '.join(PEERS)}.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Turns of each contender, after the first.")

Prompts = list[list[int]]
Answers = Callable[[Prompts], Prompts]


class OfEngine:
    """lmlib's engine, with as many slots as the most requests at once."""

    def __init__(self, folder: Path, slots: int):
        self.engine = Engine(
            hf.load(folder), None, Compute(dtype="float32"), slots, LENGTH, prefix_rows=2
        )

    def __call__(self, prompts: Prompts) -> Prompts:
        found: Prompts = [[] for _ in prompts]
        for prompt, tokens in zip(prompts, found, strict=True):
            self.begin(prompt, NEW, lambda new, tokens=tokens: tokens.extend(new))
        while self.engine.running or self.engine.prefilling:
            self.engine.turn()
        return found

    def begin(self, prompt: list[int], count: int, receive: Callable[[list[int]], Any]) -> None:
        def told(update: Update) -> None:
            receive([token.id for token in update.tokens])

        self.engine.begin(Answer(Request(tuple(prompt), count, GREEDY, 0), told))

    def first_token(self, long: Prompts, short: list[int]) -> float:
        """Returns CPU-seconds from a request to its first token, behind long ones."""
        for prompt in long:
            self.begin(prompt, 8, lambda new: None)
        if long:
            for _ in range(2):
                self.engine.turn()
        heard = list[int]()
        began = time.process_time()
        self.begin(short, 8, heard.extend)
        while not heard:
            self.engine.turn()
        seconds = time.process_time() - began
        while self.engine.running or self.engine.prefilling:
            self.engine.turn()
        return seconds


def loop(folder: Path) -> Answers:
    generator = Generator(hf.load(folder), compute=Compute(dtype="float32"), rows=1, length=LENGTH)
    return lambda prompts: [generator([prompt], NEW, GREEDY)[0][0].tokens for prompt in prompts]


def _of_transformers(folder: Path) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", attn_implementation="sdpa"
    ).eval()
    model.generation_config.update(
        do_sample=False, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0
    )
    return model


def generate(folder: Path) -> Answers:
    import torch

    model = _of_transformers(folder)

    def answer(prompt: list[int]) -> list[int]:
        tokens = torch.tensor([prompt])
        made: list[int] = model.generate(tokens, attention_mask=torch.ones_like(tokens))[0].tolist()
        return made[len(prompt) :]

    return lambda prompts: [answer(prompt) for prompt in prompts]


def continuous(folder: Path) -> Answers:
    from transformers import ContinuousBatchingConfig

    model = _of_transformers(folder)
    settings = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=1_024)

    def answers(prompts: Prompts) -> Prompts:
        made = model.generate_batch(prompts, None, settings, persistent_manager=True, warmup=False)
        by_prompt = {tuple(each.prompt_ids): each.generated_tokens for each in made.values()}
        return [by_prompt[tuple(prompt)] for prompt in prompts]

    return answers


def measured(size: str, peers: Sequence[str], folder: Path) -> str | None:
    """Prints the tables. Returns a line with the contenders whose tokens differ, if any."""
    model = llama(**SIZES[size], key=jax.random.key(0))
    hf.save(model, folder, model_type="llama", dtype="float32", longest=LENGTH)
    at_once = [int(each) for each in _AT_ONCE.value]
    engine = OfEngine(folder, max(at_once))
    contenders: dict[str, Answers] = {"engine": engine, "loop": loop(folder)}
    contenders |= {
        name: {"generate": generate, "continuous": continuous}[name](folder) for name in peers
    }
    rng = random.Random(0)

    def prompts(count: int, length: int = PROMPT) -> Prompts:
        return [rng.choices(range(model.vocab), k=length) for _ in range(count)]

    rates: dict[tuple[str, int], list[float]] = {}
    others = set()
    for turn in range(_ROUNDS.value + 1):
        for count in at_once:
            given, made = prompts(count), {}
            for name, answers in contenders.items():
                asked = given[:_FEW] if name in ONE_BY_ONE else given
                began = time.process_time()
                made[name] = answers(asked)
                rate = len(asked) * NEW / (time.process_time() - began)
                if turn > 0:
                    rates.setdefault((name, count), []).append(rate)
            expected = made["engine"]
            others |= {name for name, each in made.items() if each != expected[: len(each)]}
    middle = {key: statistics.median(each) for key, each in rates.items()}
    head = [""]
    for count in at_once:
        head += [f"{count} at once, tokens/CPU-s", "engine ÷ it"]
    table = [head]
    for name in contenders:
        row = [name]
        for count in at_once:
            rate = middle[name, count]
            row += [f"{rate:,.1f}", f"{middle['engine', count] / rate:.2f}"]
        table.append(row)
    print(
        f"\n{size}: prompts of {PROMPT} tokens and {NEW} more; calls of {engine.engine.rows} rows"
    )
    print(columns(table), flush=True)
    waits = [["long prompts", "CPU-seconds to a short prompt's first token"]]
    for count in (0, 1, max(at_once) // 2):
        found = [
            engine.first_token(prompts(count, LONG), *prompts(1)) for _ in range(_ROUNDS.value)
        ]
        waits.append([f"{count}", f"{statistics.median(found):.3f}"])
    print(columns(waits), flush=True)
    return (
        f"{size}: other tokens than the engine's: {', '.join(sorted(others))}" if others else None
    )


def main(arguments: Sequence[str]) -> None:
    if arguments[1:]:
        sys.exit(f"unknown argument {arguments[1]!r}; options begin with --, see --help")
    logging.set_verbosity(logging.WARNING)
    choose_devices()
    peers = [name for name in _BESIDE.value if name]
    if peers and None in map(importlib.util.find_spec, ("torch", "transformers")):
        print("transformers: not installed, or PyTorch (pip install 'lmlib[parity]')")
        peers = []
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        problems = [measured(size, peers, Path(folder, size)) for size in _SERVED.value]
    if failures := [problem for problem in problems if problem]:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    app.run(main)
