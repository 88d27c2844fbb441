"""The experiment on one's own tokens: its sizes and its refusals."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import fiddle as fdl
import jax
import pytest
from compiled_programs import XLA_FLAGS
from own_texts import HELD_OUT, write_own_texts

from runner.config import configs
from runner.errors import ConfigError

ROOT = Path(configs.__file__).parents[2]
TRAIN_TOKENS = 100 * 44


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    write_own_texts(folder / "DATA")
    return folder


def config(folder, *overrides):
    return configs.load("experiments/own_text", overrides=[f"tokens={folder / 'DATA'}", *overrides])


def tokens_of_run(cfg):
    return cfg.steps * cfg.data.batch_size * cfg.data.sequence_length


@pytest.mark.parametrize("layers", [1, 3])
def test_the_run_sees_what_its_parameters_or_its_data_are_worth(folder, layers):
    cfg = config(folder, f"layers={layers}")
    made = jax.eval_shape(lambda: fdl.build(cfg.model)(key=jax.random.key(0)))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(made))
    assert cfg.model.vocab == 258
    assert tokens_of_run(cfg) == pytest.approx(4 * TRAIN_TOKENS, rel=0.05)

    share = 9_000 / parameters
    cfg = config(folder, f"layers={layers}", f"tokens_per_parameter={share}")
    assert tokens_of_run(cfg) == pytest.approx(9_000, rel=0.05)


def test_a_longer_run_has_larger_batches_as_long_as_the_data_fills_them(tmp_path):
    write_own_texts(tmp_path / "DATA", documents=2_000)
    for epochs, batch_size, sequence_length in ((4, 8, 128), (500, 8, 1_024), (1e6, 64, 1_024)):
        cfg = config(tmp_path, f"epochs={epochs}", "tokens_per_parameter=1e9")
        assert (cfg.data.batch_size, cfg.data.sequence_length) == (batch_size, sequence_length)


def test_prompts_are_how_held_out_texts_begin(folder):
    prompts = config(folder).samples.prompts
    assert len(prompts) == len(HELD_OUT)
    for prompt, text in zip(prompts, HELD_OUT, strict=True):
        assert prompt and " ".join(text.split()).startswith(prompt)


def test_invalid_data_is_refused_in_a_sentence(folder, tmp_path):
    def error(*overrides: str) -> str:
        with pytest.raises(ConfigError) as raised:
            configs.load("experiments/own_text", overrides=overrides)
        assert "failed" not in str(raised.value)
        return str(raised.value)

    assert "there is no data set at" in error(f"tokens={tmp_path}/nowhere")
    assert "give --fdl.tokens=" in error()
    assert "layers must be positive, got 0" in error(f"tokens={folder}/DATA", "layers=0")
    shutil.copytree(folder / "DATA/train", tmp_path / "half/train")
    assert "no split 'validation'; it has train; --validation_fraction=0.05 holds" in error(
        f"tokens={tmp_path}/half"
    )
    write_own_texts(tmp_path / "short", documents=20)
    assert "holds 880 tokens, and a step takes 1,024 at least: pretokenize more" in error(
        f"tokens={tmp_path}/short"
    )


@pytest.mark.slow
def test_each_command_prints_the_next_one_until_the_model_speaks(tmp_path):
    """Names of folders have to be quoted, and the environment is not activated."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PATH": "/usr/bin:/bin",
        "XLA_FLAGS": XLA_FLAGS,
    }
    texts = tmp_path / "it's mine" / "some texts"
    texts.mkdir(parents=True)
    for number in range(8):
        line = f"The {number}th dog lies in the sun, and so it is.\n"
        (texts / f"{number}.txt").write_text(line * 40)
    flags = ["--dataset=some texts", "--vocab_size=270", "--style=llama3", "--out=TOK"]
    command = shlex.join([sys.executable, "-m", "data_tools.train_tokenizer", *flags])
    shown = ""
    for more in ("", "", " --fiddler=tiny --fdl.steps=2", " --max_tokens=4"):
        done = subprocess.run(
            command + more, shell=True, cwd=texts.parent, env=environment, capture_output=True,
            text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        shown = done.stdout
        command = shown.partition("try next")[2].partition("\n")[0].strip()
    assert shown.startswith("The ") and not command
