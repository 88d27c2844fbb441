"""Mistakes of users are reported in one line, with exit code 2, and change nothing on disk."""

import errno
import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from byte_texts import write_texts
from folder_contents import files_of
from forked_processes import run_forked
from hugging_face_families import GOLDEN
from sentinels import sentinels

from runner import fit
from runner.command_line.command import exit_code, tell
from runner.command_line.exit_status import FAILED
from runner.config import configs
from runner.errors import ConfigError, error_text

TINY = ("--fdl_config=experiments/llama_84m", "--fiddler=tiny")
SMALL = ("model.layers=1", "model.embed=16", "model.mlp=16", "mesh.fsdp=1", "validation=None")

EXPERIMENTS = {
    "raising.py": "def config(): return {}['model']",
    "flat.py": """
import fiddle as fdl
from experiments import llama_84m
from lmlib.data.flat_tokens import FlatTokens
def config():
    cfg = llama_84m.config()
    llama_84m.tiny(cfg)
    cfg.data = fdl.Config(FlatTokens, "{data}", "train", 8, 16)
    cfg.validation = None
    return cfg
""",
    "own_mixer.py": """
import fiddle as fdl
from jaxtyping import Array, Float
from experiments import llama_84m
from lmlib.models.part import Part
from lmlib.models.weights import fan_in, initial_values, weight
from lmlib.parallel.layout import reshard
class Square(Part):
    w: Float[Array, "embed embed"] = weight(fan_in("embed"))
    def __init__(self, embed, *others, key, **more):
        self.w = initial_values(self, "w", key, embed=embed)
    def __call__(self, x_BSE, context, cache=None):
        return x_BSE, cache
class OneArray(Part):
    w: Float[Array, "embed own"] = weight(fan_in("embed"), rules={"own": None})
    def __init__(self, embed, *others, key, **more):
        self.w = initial_values(self, "w", key, embed=embed, own=1)
    def __call__(self, x_BSE, context, cache=None):
        return reshard(x_BSE, context.compute.residual)
def config():
    cfg = llama_84m.config()
    llama_84m.tiny(cfg)
    cfg.model.attention = fdl.Partial(OneArray)
    cfg.data.batch_size, cfg.mesh.fsdp = 2, 1
    cfg.validation = None
    return cfg
def square(cfg):
    cfg.model.attention = fdl.Partial(Square)
""",
}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """Experiments, data sets and a run, some of them damaged."""
    folder = tmp_path_factory.mktemp("mistakes")
    for name, text in EXPERIMENTS.items():
        (folder / name).write_text(text.replace("{data}", str(folder / "data")))
    write_texts(folder / "data")
    for name in ("damaged", "other_version"):
        shutil.copytree(folder / "data", folder / name)
    metadata = "train/shard_00000_of_00001/metadata.json"
    (folder / "damaged" / metadata).write_text("{")
    content = json.loads((folder / "data" / metadata).read_text()) | {"version": 99}
    (folder / "other_version" / metadata).write_text(json.dumps(content))

    cfg = configs.load(
        "experiments/llama_84m", ["tiny"], (*SMALL, "steps=2", "checkpoints.every=1")
    )
    fit(cfg, folder / "old")
    for name in ("newest_damaged", "all_damaged"):
        shutil.copytree(folder / "old", folder / name)
    _flip(folder / "newest_damaged" / "checkpoints" / "2")
    _flip(folder / "all_damaged" / "checkpoints" / "1")
    _flip(folder / "all_damaged" / "checkpoints" / "2")
    (folder / "empty").mkdir()
    (folder / "file").write_text("a file")
    (folder / "dangling").symlink_to("nowhere")
    stranger = (folder / "old" / "config.json").read_text()
    (folder / "stranger.json").write_text(stranger.replace("lmlib.optim.adamw", "subprocess"))
    return folder


@pytest.fixture(scope="module")
def files(scratch):
    """The files before any mistake, which must not change."""
    return files_of(scratch)


def _flip(step: Path) -> None:
    file = max(step.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


# Expansions of the words in capitals in the table.
WORDS = {
    "TINY": [*TINY],
    "NEW": ["--workdir={run}"],  # a folder that is not there
    "OLD": ["--workdir={old}"],  # a run of two steps
    "RESUMED": [*TINY, *(f"--fdl.{override}" for override in (*SMALL, "steps=3"))],
    "FORKED": ["--workdir={run}", "--init_from={old}@2", "--continue_optimizer"],
    "FLAT": ["--fdl_config={scratch}/flat.py", "--workdir={run}"],
    "LONG_NAME": ["--workdir={run}" + "x" * 300],
    "LONG_PATH": ["--workdir={run}" + "/folder" * 600],
    "GENERATE": ["--from={old}", "--tokens=1"],
    "ANSWER": ["--from={old}", "--out={run}"],
    "TRANSFER": ["--fdl_config=experiments/transfer"],
}


def cases(table: str) -> list[tuple[str, str]]:
    lines = Path(__file__).with_name(table).read_text().splitlines()
    return [(line.partition(" | ")[0], line.partition(" | ")[2]) for line in lines]


ALL = cases("mistakes.txt")


@pytest.mark.parametrize(
    ("command", "message"),
    sentinels(ALL, lambda mistake: mistake in ALL[::8] or "pretokenize" in mistake[1]),
    ids=[command for command, _ in ALL],
)
def test_a_mistake_is_reported_in_one_line_and_changes_nothing(
    scratch, files, tmp_path, command, message
):
    places = {"scratch": scratch, "old": scratch / "old", "run": tmp_path / "new", "golden": GOLDEN}

    def filled(text: str) -> str:
        for name, place in places.items():
            text = text.replace(f"{{{name}}}", str(place))
        return text

    module, *given = command.split()
    arguments = [word for each in given for word in WORDS.get(each, [each])]
    ended = run_forked("-m", module, *map(filled, arguments), environment={"HF_HUB_OFFLINE": "1"})
    shown = f"{ended.stdout}\n---\n{ended.stderr}"
    assert ended.returncode == 2, shown
    last = ended.stderr.rstrip().splitlines()[-1]
    assert filled(message) in last, shown
    start = "error: " if module.startswith("runner") else f"{module.rpartition('.')[2]}: "
    assert last.startswith(start), shown
    assert sum(line.startswith(start) for line in ended.stderr.splitlines()) == 1, shown
    assert "Traceback" not in shown
    assert files_of(scratch) == files
    assert list(tmp_path.iterdir()) == []


# All refused in one place.
PARTS = cases("parts_that_do_not_fit.txt")


@pytest.mark.parametrize(("override", "message"), sentinels(PARTS, lambda part: part in PARTS[::6]))
def test_parts_that_do_not_fit_are_refused_before_anything_compiles(tmp_path, override, message):
    with pytest.raises(ConfigError) as raised:
        fit(configs.load("experiments/llama_84m", ["tiny"], [override]), tmp_path / "new")
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_where_a_mistake_was_found(scratch):
    arguments = (*TINY, f"--workdir={scratch / 'new'}", "--fdl.steps=0")
    ended = run_forked("-m", "runner", *arguments, "--debug")
    assert ended.returncode == 2
    assert "Traceback" in ended.stderr and "lmlib/experiment/__init__.py" in ended.stderr
    assert "steps must be at least 1, got 0" in ended.stderr


def test_notes_by_jax_about_tracebacks_are_left_out():
    def refuse(x):
        raise ValueError("heads must divide embed")

    with pytest.raises(ValueError, match="heads must divide") as raised:
        jax.jit(refuse)(1.0)
    raised.value.add_note("and another note stays")
    assert error_text(raised.value) == "heads must divide embed and another note stays"


def test_a_full_disk_is_reported_with_its_free_space(tmp_path):
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{tmp_path}/stacks")
    error.add_note("And a note.")
    told = error_text(error)
    assert told.startswith(f"cannot write {tmp_path}/stacks: the disk is full, ")
    assert told.endswith(" bytes are free: make room there (No space left on device) And a note.")


@pytest.mark.parametrize("zeros", [np.zeros, jnp.zeros])
def test_a_lack_of_memory_is_reported_in_one_line(zeros, capsys):
    with pytest.raises((MemoryError, RuntimeError)) as raised:  # beyond what can be addressed
        zeros((1 << 57,), "float32")
    tell(raised.value, debug=False)
    told = capsys.readouterr().err
    assert told.startswith("error: out of memory: ") and told.count("\n") == 1
    assert exit_code(raised.value) == FAILED
    tell(raised.value, debug=True)
    assert "Traceback" in capsys.readouterr().err
