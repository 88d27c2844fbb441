"""The files that commands of README and docs/ find where tests run them."""

import json
from pathlib import Path

import fiddle as fdl
import jax
from made_up_runs import leave_run
from megatron_data import write_megatron
from seqax_data import write_seqax
from small_tokenizer import TEXTS, write_tokenizer_folder

from data_tools.pretokenize.texts import pretokenize
from data_tools.rows.source import Texts
from data_tools.tokenizer import load_tokenizer
from data_tools.train_tokenizer.byte_level_bpe import train_byte_level_bpe
from lmlib import hf
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.text import write_tokenizer
from lmlib.models.families.llama import llama
from lmlib.optim.average import WeightAverage
from runner import fit
from runner.config import configs

CHAT = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "The apple."}]
_SIZES = dict(embed=16, layers=1, heads=2, mlp=16)


def make_world(folder: Path) -> None:
    """Texts, chats, tokenizers, data sets, a folder of Hugging Face's, runs."""
    (folder / "texts").mkdir(parents=True)
    for number in range(300):
        text = TEXTS[number % len(TEXTS)]
        (folder / f"texts/{number:03}.txt").write_text(f"{number} {text} " * 3)
    (folder / "texts.txt").write_text(
        "\n\n".join(f"{i} {text}" for i in range(40) for text in TEXTS)
    )
    rows = [json.dumps({"text": text}) for text in TEXTS * 5]
    (folder / "books.jsonl").write_text("\n".join(rows))
    (folder / "chats.jsonl").write_text(
        "\n".join(json.dumps({"messages": [*CHAT, {"role": "user", "content": f"{i}?"}, CHAT[1]]})
                  for i in range(80))
    )  # fmt: skip
    labelled = ({"prompt": f"{i}?", "completion": "An apple.", "label": i > 9} for i in range(80))
    (folder / "labelled.jsonl").write_text("\n".join(map(json.dumps, labelled)))
    (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    vocab = write_tokenizer_folder(folder / "templated", begins=True)
    byte_level = train_byte_level_bpe(TEXTS, 300)
    write_tokenizer(folder / "tokenizer.json", byte_level.tokenizer_json)
    _write_model(folder, vocab)
    tokenizer = load_tokenizer(str(folder / "qwen"))
    texts = [f"{i} {text}" for i in range(60) for text in TEXTS]
    for split in ("train", "validation"):
        pretokenize(Texts(texts), tokenizer, folder / "data", split, workers=0)
    write_seqax(folder / "seqax", [[1, 2], [3, 4, 5]])
    write_megatron(folder / "megatron", [[[*range(1, 250)], [3, 4]]] * 20)
    _write_run(folder, vocab)
    write_sweep(folder / "sweep")
    write_ladder(folder / "ladder")
    _write_question(folder / "question")


def _write_model(folder: Path, vocab: int) -> None:
    model = llama(vocab=vocab, **_SIZES, key=jax.random.key(0))
    hf.save(model, folder / "qwen", tokenizer=folder / "templated")


def _write_run(folder: Path, vocab: int) -> None:
    """Two checkpoints of one step each."""
    sizes = [f"model.{name}={size}" for name, size in (_SIZES | {"vocab": vocab}).items()]
    cfg = configs.load("experiments/llama_84m", ["tiny"], [*sizes, "model.head_dim=8"])
    data = {"path": str(folder / "data"), "batch_size": 8, "sequence_length": 64}
    cfg.data = fdl.Config(FlatTokens, split="train", **data)
    cfg.validation = fdl.Config(FlatTokens, split="validation", seed=None, epochs=1, **data)
    cfg.steps, cfg.checkpoints.every = 2, 1
    cfg.average = fdl.Config(WeightAverage)
    fit(cfg, folder / "run")


def write_sweep(folder: Path) -> None:
    """Two rates, three seeds of each."""
    for rate in (0.001, 0.003):
        for seed in range(3):
            settings = {"optimizer.peak_lr": rate, "seed": seed}
            loss = 3.0 - 20 * rate + 0.01 * seed * (1 + 2 * rate)
            leave_run(folder / f"{rate}_{seed}", loss, settings)


def _write_question(folder: Path) -> None:
    """Two widths, with and without norms, three seeds of each."""
    for embed in (64, 128):
        for norm in (False, True):
            for seed in range(3):
                settings = {"embed": embed, "query_key_norm": norm, "seed": seed}
                loss = 4.0 - embed / 500 + 0.01 * norm + 0.01 * seed
                curve = {50: loss + 0.5, 100: loss}
                leave_run(folder / f"{embed}_{norm}_{seed}", loss, settings, curve=curve)


def write_ladder(folder: Path) -> None:
    """Three sizes, three lengths of each."""
    for parameters in (10**7, 10**8, 10**9):
        for ratio in (5, 20, 80):
            tokens = ratio * parameters
            loss = 1.7 + 400 * parameters**-0.34 + 400 * tokens**-0.28
            sizes = {"parameters": parameters, "tokens": tokens}
            leave_run(folder / f"{parameters}_{ratio}", loss, {"model.embed": parameters}, **sizes)
