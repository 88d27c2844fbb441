"""What users get wrong: told in one line, with exit code 2, and nothing on disk is changed."""

import errno
import importlib
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
from run_on_bytes import write_run_on_bytes
from sentinels import sentinels

from runner import fit
from runner.command_line.command import exit_code, tell
from runner.command_line.exit_status import FAILED
from runner.config import configs
from runner.errors import ConfigError, in_words

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
    """What lies there before any mistake, and is to stay."""
    return files_of(scratch)


def _flip(step: Path) -> None:
    file = max(step.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


# A line for each mistake: the command, and what its one line of output must say. Words in capitals
# stand for `WORDS`.
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
MISTAKES = """
runner | give --fdl_config, for example experiments/quickstart
runner TINY | give --workdir
runner TINY NEW --stepz=3 | Unknown command line flag 'stepz'
runner TINY NEW quickly | unknown argument 'quickly'; flags begin with --
runner TINY NEW --profile=12:10 | --profile=12:10: write the first and the last step
runner TINY NEW --process_id=1 | all together
runner TINY NEW --coordinator=here --num_processes=2 --process_id=0 | write host:port of process 0
runner TINY NEW --coordinator=localhost:981234 --num_processes=2 --process_id=1 | from 1 to 65535
runner TINY NEW --coordinator=here:1 --num_processes=2 --process_id=2 | they are 0 to 1
runner TINY NEW --allow_change=shape | allow_change=shape
runner TINY NEW --grace_seconds=0 | grace_seconds=0
runner TINY NEW --step_seconds=nan | step_seconds must be a number
runner TINY NEW --startup_seconds=1000000000000 | not an integer in the range [1, 2147483647]
runner --fdl_config={scratch}/raising.py NEW | raising.py:1
runner --fdl_config={scratch}/empty NEW | empty/config.json cannot be read
runner --fdl_config={scratch}/stranger.json NEW | --trust_module=subprocess
runner --fdl_config=experiments/llama_84m --fiddler=tiny(3) NEW | takes 1 positional argument
runner TINY NEW --fdl.model.layers=2.5 | 2.5 is of type float, but this parameter takes int
runner TINY NEW --fdl.steps=0 | steps must be at least 1, got 0
runner --fdl_config={scratch}/own_mixer.py --fiddler=square NEW | two axes of one array are named
runner --fdl_config={scratch}/own_mixer.py NEW | must return a tuple (y_BSE, cache), got an array
runner --fdl_config=experiments/llama_84m NEW | python -m data_tools.pretokenize
runner FLAT --fdl.data.path={scratch}/damaged | metadata.json is damaged
runner FLAT --fdl.data.path={scratch}/other_version | version 99
runner FLAT --fdl.data.epochs=1 | data ends after
runner FLAT --fdl.data.sequence_length=1_000_000_000 | and has 102 tokens in all
runner TINY --workdir={scratch}/file | {scratch}/file is a file; name a folder
runner TINY --workdir={scratch}/file/below/run | {scratch}/file is no folder
runner TINY --workdir={scratch}/dangling | is a link to nowhere, and nothing is there
runner TINY LONG_NAME | bytes, and the file system takes 255
runner TINY LONG_PATH | bytes, and the file system takes 4,096
runner TINY --workdir={scratch}/data | data holds train, and no run: use another folder, or
runner TINY --workdir=az://bucket/run | remote folders are not supported here: mount
runner TINY --workdir=/proc/nowhere | /proc/nowhere
runner RESUMED OLD --fdl.model.mlp=32 | whose shapes are others: use another workdir
runner RESUMED OLD --fdl.model.rope_theta=5e5 | or give --allow_change=model to go on all the
runner RESUMED FORKED --fdl.model.mlp=32 | those of another model with other shapes
runner RESUMED OLD --fdl.guard={} | this is a whole config, of lmlib.guard.Guard
runner RESUMED --workdir={scratch}/all_damaged | None of the 2 checkpoints there is sound
runner RESUMED --workdir={scratch}/newest_damaged --nocheckpoint_fallback | checkpoints/2 is damaged
runner.checkpoint | give a command and a workdir
runner.checkpoint lst {old} | unknown command 'lst'. Did you mean list?
runner.checkpoint list az://bucket/run | remote folders are not supported here
runner.checkpoint verify {old} --step=7 | holds no checkpoint at step 7; it has [1, 2]
runner.checkpoint prune {old} | give --keep
runner.checkpoint prune {scratch}/newest_damaged --keep=1 | keep at least 2
runner.compare {scratch}/empty | there is no run in
runner.compare {scratch}/old --margin=1 | give --baseline and --margin together
runner.ladder | name runs, or folders of runs
runner.convert --from={old} | give --from and --to
runner.convert --from={old} --to={run} --adapters | has no adapters: leave out --adapters
runner.convert --from=nobody/nothing --to={run} | hf download nobody/nothing
runner.coordinate_check TINY | needs cfg.scaling
runner.coordinate_check TRANSFER --widths=64 | two different sizes or more
runner.coordinate_check TRANSFER --picture=check.pdf | its ending is .svg or .png
runner.inspect | give the workdir of a run
runner.inspect {old} --batch=0 --verify | --batch and --verify are two commands
runner.replay | give the folder of a capture
runner.generate | give --from and a prompt
runner.generate --from={old} | on a terminal prompts are typed
runner.generate --from={old} --prompt=a | knows no tokenizer: give --tokenizer
runner.generate --from={old} --prompt=a --tokens=1 | two ways to ask: give one
runner.generate --from={old} --tokens=1,b | --tokens=1,b: write ids as 1,2,3
runner.generate --from={old} --tokens=512 | has no token 512: ids end at 511
runner.generate GENERATE --rows=2 | --rows is for --prompts
runner.generate GENERATE --chat | --chat is for --prompt and
runner.generate GENERATE --top_p=2 | top_p must be above 0
runner.generate GENERATE --temperature=nan | temperature must be
runner.generate GENERATE --max_tokens=1000000000 | would take
runner.generate --from={old} --prompts={scratch}/file | go together
runner.generate ANSWER --prompts=/dev/zero | /dev/zero is no ordinary file
runner.generate ANSWER --prompts={scratch}/file | line 1: Expecting value
runner.generate --from={old} --prompts={scratch}/file --out={scratch}/file | give another
runner.evaluate | give --from and --data
runner.evaluate --from={old} --suite --tasks=arc_easy | three evaluations: give one
runner.evaluate --from={old} --data={scratch}/data --split=train --batch_size=2000000000 | smaller
data_tools.inspect {scratch}/damaged | metadata.json is damaged
data_tools.pretokenize --dataset={scratch}/no.jsonl --tokenizer=bytes --out={run} | no.jsonl
data_tools.pretokenize --dataset={scratch}/file --tokenizer=bytes --out=gs://b/out | which no bucket
data_tools.convert {scratch}/data gs://b/out | remote folders are
"""
ALL = [line.partition(" | ")[::2] for line in MISTAKES.strip().splitlines()]
# Parts that do not fit, which are all refused in one place: an override, and the message.
PARTS = """
microbatches=3 | 8 sequences do not divide into 3 microbatches
mesh.fsdp=0 | each size must be at least 1, or -1
mesh.tensor=8 | axis 'heads' of size 4 cannot be split
data.batch_size=6 | axis 'batch' of size 6 cannot be split
model.vocab=256 | token ids up to 511, but the model's vocabulary ends at 255
objective.dropout=1.5 | dropout
compute.dtype=int8 | dtype must be a floating type
compute.attention=cudnn | runs on NVIDIA GPUs, and the devices are cpu: use 'auto'
compute.attention=flash | attention must be one of auto, cudnn, triton, splash
compute.attention=splash | a multiple of 128, not 64; use 'blockwise' or 'auto'
compute.loss_chunk=0 | loss_chunk must be at least 1, or None, got 0
compute.saved=('query', 'keys') | did you mean 'key'
optimizer.first_moment_dtype=int8 | must be 'float32' or 'bfloat16', got 'int8'
optimizer.peak_lr=-1.0 | peak_lr
optimizer.b2=2.0 | b2
optimizer.schedule.warmup=7.0 | warmup
evaluation.batches=0 | evaluation.batches must be at least 1, got 0
prefetch_batches=0 | prefetch_batches must be at least 1, got 0
checkpoints.keep=0 | checkpoints.keep must be at least 1, got 0
guard.captures=-1 | guard.captures must be at least 0, got -1
seed=-1 | seed must be in [0, 2^32), got -1
steps=1000000000000000000000000000000 | steps must be below 2^31
model.layers=1000000000 | layers must be at most 10,000, got 1,000,000,000
model.embed=1000000000 | would take
data.batch_size=1000000000000 | a batch would take
objective.z_loss=1e400 | z_loss must not be negative or infinite, got inf
"""


@pytest.mark.landing
def test_a_part_of_a_saved_model_is_named_too(scratch, tmp_path, monkeypatch):
    """Whatever the user has changed in it since the model was trained."""
    monkeypatch.syspath_prepend(scratch)
    mixer = importlib.import_module("own_mixer").OneArray
    workdir, _ = write_run_on_bytes(tmp_path, attention=mixer)
    flags = (f"--from={workdir}", "--trust_module=own_mixer", "--tokens=1,2")
    ended = run_forked("-m", "runner.generate", *flags, cwd=scratch)
    assert ended.returncode == 2, ended.stderr
    (line,) = (line for line in ended.stderr.splitlines() if "own_mixer" in line)
    assert line.startswith("error: own_mixer.OneArray must return a tuple (y_BSE, cache)")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("command", "message"),
    sentinels(ALL, lambda mistake: mistake in ALL[::8] or "pretokenize" in mistake[1]),
    ids=[command for command, _ in ALL],
)
def test_a_mistake_is_told_in_one_line_and_changes_nothing(
    scratch, files, tmp_path, command, message
):
    names = {"scratch": str(scratch), "old": str(scratch / "old"), "run": str(tmp_path / "new")}

    def filled(text: str) -> str:
        for name, value in names.items():
            text = text.replace(f"{{{name}}}", value)
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


PARTS_AND_MESSAGES = [line.partition(" | ")[::2] for line in PARTS.strip().splitlines()]


@pytest.mark.parametrize(
    ("override", "message"),
    sentinels(PARTS_AND_MESSAGES, lambda part: part in PARTS_AND_MESSAGES[::6]),
)
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


def test_what_jax_says_of_its_traceback_is_left_out():
    def refuse(x):
        raise ValueError("heads must divide embed")

    with pytest.raises(ValueError, match="heads must divide") as raised:
        jax.jit(refuse)(1.0)
    raised.value.add_note("and another note stays")
    assert in_words(raised.value) == "heads must divide embed and another note stays"


def test_a_full_disk_is_told_with_what_it_lacks(tmp_path):
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{tmp_path}/stacks")
    error.add_note("And a note.")
    told = in_words(error)
    assert told.startswith(f"cannot write {tmp_path}/stacks: the disk is full, ")
    assert told.endswith(" bytes are free: make room there (No space left on device) And a note.")


@pytest.mark.parametrize("zeros", [np.zeros, jnp.zeros])
def test_a_lack_of_memory_is_told_in_a_line(zeros, capsys):
    with pytest.raises((MemoryError, RuntimeError)) as raised:  # beyond what can be addressed
        zeros((1 << 57,), "float32")
    tell(raised.value, debug=False)
    told = capsys.readouterr().err
    assert told.startswith("error: out of memory: ") and told.count("\n") == 1
    assert exit_code(raised.value) == FAILED
    tell(raised.value, debug=True)
    assert "Traceback" in capsys.readouterr().err
