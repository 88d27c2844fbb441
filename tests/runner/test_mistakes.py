"""What users get wrong: told in one line, with exit code 2, and nothing on disk is changed."""

import importlib
import json
import shutil
from pathlib import Path

import fiddle as fdl
import pytest
from byte_texts import write_texts
from folder_contents import files_of
from forked_processes import run_forked
from run_on_bytes import write_run_on_bytes
from sentinels import sentinels

from runner import fit
from runner.command_line.command import tell
from runner.config import configs
from runner.errors import ConfigError, user_errors

TINY = ("--fdl_config=experiments/llama_84m", "--fiddler=tiny")
SMALL = ("model.layers=1", "model.embed=16", "model.mlp=16", "mesh.fsdp=1", "validation=None")
NEW = "--workdir={run}"  # a folder that is not there
OLD = "--workdir={old}"  # a run of two steps
RESUMED = (*TINY, *(f"--fdl.{override}" for override in (*SMALL, "steps=3")))
FORKED = (NEW, "--init_from={old}@2", "--continue_optimizer")
FLAT = (*TINY, NEW, "--fdl_config={scratch}/flat.py")

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


def setting(override: str) -> tuple[str, ...]:
    return (*TINY, NEW, f"--fdl.{override}")


def resumed(*arguments: str) -> tuple[str, ...]:
    return (*RESUMED, *arguments)


# Arguments, and what the line must say.
RUNNER = [
    # Flags.
    ((), "give --fdl_config, for example experiments/quickstart"),
    (TINY, "give --workdir"),
    ((*TINY, NEW, "--stepz=3"), "Unknown command line flag 'stepz'"),
    ((*TINY, NEW, "quickly"), "unknown argument 'quickly'; flags begin with --"),
    ((*TINY, NEW, "--profile=12:10"), "--profile=12:10: write the first and the last step"),
    ((*TINY, NEW, "--num_processes=0"), "num_processes=0"),
    ((*TINY, NEW, "--process_id=1"), "all together"),
    (
        (*TINY, NEW, "--coordinator=here", "--num_processes=2", "--process_id=0"),
        "--coordinator=here: write host:port of process 0",
    ),
    (
        (*TINY, NEW, "--coordinator=localhost:981234", "--num_processes=2", "--process_id=1"),
        "--coordinator=localhost:981234: write host:port of process 0, the port from 1 to 65535",
    ),
    (
        (*TINY, NEW, "--coordinator=here:1", "--num_processes=2", "--process_id=2"),
        "--process_id=2: with --num_processes=2 they are 0 to 1",
    ),
    ((*TINY, NEW, "--distributed=maybe"), "distributed=maybe"),
    ((*TINY, NEW, "--allow_change=shape"), "allow_change=shape"),
    ((*TINY, NEW, "--grace_seconds=0"), "grace_seconds=0"),
    ((*TINY, NEW, "--step_seconds=-1"), "step_seconds=-1"),
    ((*TINY, NEW, "--data_seconds=0"), "data_seconds=0"),
    ((*TINY, NEW, "--step_seconds=nan"), "step_seconds must be a number"),
    ((*TINY, NEW, f"--startup_seconds={10**30}"), "not an integer in the range [1, 2147483647]"),
    ((*TINY, NEW, "--checkpoint_fallback=perhaps"), "checkpoint_fallback=perhaps"),
    # Configs.
    (("--fdl_config={scratch}/raising.py", NEW), "raising.py:1"),
    (("--fdl_config={scratch}/empty", NEW), "empty/config.json cannot be read"),
    (("--fdl_config={scratch}/stranger.json", NEW), "--trust_module=subprocess"),
    ((TINY[0], "--fiddler=tiny(3)", NEW), "takes 1 positional argument"),
    (setting("model.layers=2.5"), "expected an integer, got 2.5"),
    # Parts of the user's.
    (
        ("--fdl_config={scratch}/own_mixer.py", "--fiddler=square", NEW),
        "attention.w: two axes of one array are named 'embed' and both would lie along 'fsdp'",
    ),
    (
        ("--fdl_config={scratch}/own_mixer.py", NEW),
        "own_mixer.OneArray must return a tuple (y_BSE, cache), got an array",
    ),
    # Data.
    (("--fdl_config=experiments/llama_84m", NEW), "python -m data_tools.pretokenize"),
    ((*FLAT[2:], NEW, "--fdl.data.path={scratch}/damaged"), "metadata.json is damaged"),
    ((*FLAT[2:], NEW, "--fdl.data.path={scratch}/other_version"), "version 99"),
    ((*FLAT[2:], NEW, "--fdl.data.epochs=1"), "data ends after"),
    (
        (*FLAT[2:], NEW, "--fdl.data.sequence_length=1_000_000_000"),
        "data makes sequences of 1,000,000,000 tokens and has 102 tokens in all",
    ),
    ((*FLAT[2:], NEW, f"--fdl.data.batch_size={10**30}"), "FlatTokens needs batch_size below 2^31"),
    # Workdirs and checkpoints.
    ((*TINY, "--workdir={scratch}/file"), "{scratch}/file is a file; name a folder"),
    ((*TINY, "--workdir={scratch}/file/below/run"), "{scratch}/file is no folder"),
    (
        (*TINY, "--workdir={scratch}/dangling"),
        "dangling is a link to nowhere, and nothing is there",
    ),
    ((*TINY, "--workdir={scratch}/dangling/run"), "dangling is a link to nowhere, and nothing is"),
    ((*TINY, f"--workdir={{run}}{'x' * 300}"), "bytes, and the file system takes 255"),
    ((*TINY, f"--workdir={{run}}{'/folder' * 600}"), "bytes, and the file system takes 4,096"),
    ((f"--fdl_config={'x' * 300}", NEW), "there is no experiment and no file 'xxx"),
    ((*TINY, "--workdir={scratch}/data"), "data holds train, and no run: use another folder, or"),
    ((*TINY, "--workdir=az://bucket/run"), "remote folders are not supported here: mount"),
    ((*TINY, "--workdir=/proc/nowhere"), "/proc/nowhere"),
    (resumed(OLD, "--fdl.model.mlp=32"), "whose shapes are others: use another workdir"),
    (resumed(OLD, "--fdl.model.rope_theta=5e5"), "or give --allow_change=model to go on all the"),
    (resumed(*FORKED, "--fdl.model.mlp=32"), "those of another model with other shapes"),
    (resumed(OLD, "--fdl.guard={'window': 3}"), "this is a whole config, of lmlib.guard.Guard"),
    (
        resumed(OLD, "--fdl.validation={'path': 3}"),
        "validation is {'path': 3}, and lmlib.experiment",
    ),
    (resumed("--workdir={scratch}/all_damaged"), "None of the 2 checkpoints there is sound"),
    (
        resumed("--workdir={scratch}/newest_damaged", "--nocheckpoint_fallback"),
        "newest_damaged/checkpoints/2 is damaged",
    ),
    (resumed(NEW, "--init_from=az://bucket/run"), "remote folders are not supported here: mount"),
]
# Parts that do not fit: an override, and what the line must say.
PARTS = [
    ("steps=0", "steps must be at least 1, got 0"),
    ("microbatches=3", "8 sequences do not divide into 3 microbatches"),
    ("mesh.fsdp=0", "each size must be at least 1, or -1"),
    ("mesh.tensor=8", "axis 'heads' of size 4 cannot be split"),
    ("data.batch_size=6", "axis 'batch' of size 6 cannot be split"),
    ("data.sequence_length=0", "sequence_length of at least 1, not 0"),
    ("model.vocab=256", "token ids up to 511, but the model's vocabulary ends at 255"),
    ("objective.dropout=1.5", "dropout"),
    ("compute.dtype=int8", "dtype must be a floating type"),
    ("compute.attention=cudnn", "runs on NVIDIA GPUs, and the devices are cpu: use 'auto'"),
    ("compute.attention=flash", "attention must be one of auto, cudnn, triton, splash"),
    ("compute.attention=splash", "a multiple of 128, not 64; use 'blockwise' or 'auto'"),
    ("compute.loss_chunk=0", "loss_chunk must be at least 1, or None, got 0"),
    ("optimizer.first_moment_dtype=int8", "must be 'float32' or 'bfloat16', got 'int8'"),
    ("compute.saved=('query', 'keys')", "did you mean 'key'"),
    ("optimizer.peak_lr=-1.0", "peak_lr"),
    ("optimizer.b2=2.0", "b2"),
    ("optimizer.schedule.warmup=7.0", "warmup"),
    ("evaluation.batches=0", "evaluation.batches must be at least 1, got 0"),
    ("prefetch_batches=0", "prefetch_batches must be at least 1, got 0"),
    ("checkpoints.keep=0", "checkpoints.keep must be at least 1, got 0"),
    ("checkpoints.keep_every=0", "checkpoints.keep_every must be at least 1, got 0"),
    ("guard.captures=-1", "guard.captures must be at least 0, got -1"),
    ("seed=-1", "seed must be in [0, 2^32), got -1"),
    (f"seed={2**70}", f"seed must be in [0, 2^32), got {2**70}"),
    (f"steps={10**30}", "steps must be below 2^31"),
    (f"model.vocab={10**30}", "vocab must be at most 2,147,483,647, got 1,000"),
    (f"model.layers={10**9}", "layers must be at most 10,000, got 1,000,000,000"),
    (f"model.embed={10**9}", "would take"),
    (f"model.window={10**30}", "window must be at least 1 and below 2^31"),
    (f"data.batch_size={10**12}", "a batch would take"),
    ("objective.z_loss=1e400", "z_loss must not be negative or infinite, got inf"),
]
OTHERS = {
    "runner.checkpoint": [
        ((), "give a command and a workdir"),
        (("list", "az://bucket/run"), "remote folders are not supported here"),
        (("verify", "{old}", "--step=7"), "holds no checkpoint at step 7; it has [1, 2]"),
        (("prune", "{old}", "--keep=0"), "keep=0"),
        (("prune", "{scratch}/newest_damaged", "--keep=1"), "keep at least 2"),
    ],
    "runner.replay": [((), "give the folder of a capture")],
    "runner.generate": [
        ((), "give --from and a prompt"),
        (("--from={old}",), "on a terminal prompts are typed"),
        (("--from={old}", "--prompt=a"), "knows no tokenizer: give --tokenizer"),
        (("--from={old}", "--prompt=a", "--tokens=1"), "two ways to ask: give one"),
        (("--from={old}", "--tokens=1,b"), "--tokens=1,b: write ids as 1,2,3"),
        (("--from={old}", "--tokens=512"), "has no token 512: ids end at 511"),
        (("--from={old}", "--prompts={scratch}/file"), "go together"),
        (("--from={old}", "--tokens=1", "--rows=2"), "--rows is for --prompts"),
        (("--from={old}", "--tokens=1", "--chat"), "--chat is for --prompt and"),
        (("--from={old}", "--tokens=1", "--top_p=2"), "top_p must be above 0"),
        (("--from={old}", "--tokens=1", "--temperature=nan"), "temperature must be"),
        (("--from={old}", "--tokens=1", "--stop="), "at least one character"),
        (("--from={old}", "--tokens=1", "--max_tokens=0"), "max_tokens=0"),
        (("--from={old}", "--tokens=1", "--max_tokens=1000000000"), "would take"),
        (("--from={old}", "--tokens=1", f"--length={10**12}"), "[2, 2147483647]"),
        (("--from={old}", "--tokens=1", f"--seed={2**70}"), "[0, 4294967295]"),
        (("--from={old}", "--tokens=1", "--dtype=int8"), "dtype=int8"),
        (("--from={old}", "--prompts=/dev/zero", "--out={run}"), "/dev/zero is no ordinary file"),
        (("--from={old}", "--prompts={scratch}/file", "--out={run}"), "line 1: Expecting value"),
        (
            ("--from={old}", "--prompts={scratch}/none", "--out={run}"),
            "directory: '{scratch}/none'",
        ),
        (("--from={old}", "--prompts={scratch}/file", "--out={scratch}/file"), "give another"),
        (("--from={old}", "--prompts={scratch}/file", "--out={run}/a"), "there is no folder {run}"),
    ],
    "runner.evaluate": [
        (("--from={old}", "--data={scratch}/data", f"--sequence_length={10**12}"), "2147483647]"),
        (
            ("--from={old}", "--data={scratch}/data", "--split=train", "--batch_size=2000000000"),
            "give a smaller --sequence_length or --batch_size",
        ),
        (("--from={old}", "--tasks=arc_easy", "--limit=inf"), "limit=inf"),
    ],
    "runner.teach": [
        (
            ("--from={old}", FLAT[-1], "--out={run}", "--batch_size=2000000000"),
            "give a smaller --batch_size",
        ),
    ],
    "data_tools.inspect": [
        ((), "give"),
        (("{scratch}/damaged",), "metadata.json is damaged"),
    ],
    "data_tools.pretokenize": [
        ((), "--"),
        (("--dataset={scratch}/no.jsonl", "--tokenizer=bytes", "--out={run}"), "no.jsonl"),
        (
            ("--dataset={scratch}/file", "--tokenizer=bytes", "--out=gs://b/out"),
            "which no bucket can",
        ),
    ],
    "data_tools.convert": [(("{scratch}/data", "gs://b/out"), "remote folders are")],
}
ALL = [
    *(("runner", *mistake) for mistake in RUNNER),
    *((module, *mistake) for module, those in OTHERS.items() for mistake in those),
    *(("runner", setting(override), message) for override, message in PARTS[:2]),
]


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
    ("module", "arguments", "message"),
    # Every eighth one, and data that is missing.
    sentinels(ALL, lambda mistake: mistake in ALL[::8] or "pretokenize" in mistake[2]),
    ids=[f"{module} {' '.join(arguments[-2:])}" for module, arguments, _ in ALL],
)
def test_a_mistake_is_told_in_one_line_and_changes_nothing(
    scratch, files, tmp_path, module, arguments, message
):
    names = {"scratch": str(scratch), "old": str(scratch / "old"), "run": str(tmp_path / "new")}

    def filled(text: str) -> str:
        for name, value in names.items():
            text = text.replace(f"{{{name}}}", value)
        return text

    ended = run_forked("-m", module, *map(filled, arguments))
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


@pytest.mark.slow
@pytest.mark.parametrize(("override", "message"), PARTS[2:])
def test_parts_that_do_not_fit_are_told_so_without_a_process(tmp_path, capsys, override, message):
    """They are all refused in one place."""
    with pytest.raises(ConfigError) as raised:
        fit(configs.load(TINY[0].partition("=")[2], ["tiny"], [override]), tmp_path / "new")
    tell(raised.value, debug=False)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ") and message in last
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_where_a_mistake_was_found(scratch):
    arguments = (*TINY, f"--workdir={scratch / 'new'}", "--fdl.steps=0")
    ended = run_forked("-m", "runner", *arguments, "--debug")
    assert ended.returncode == 2
    assert "Traceback" in ended.stderr and "lmlib/experiment/__init__.py" in ended.stderr
    assert "steps must be at least 1, got 0" in ended.stderr


def refuse(number: int) -> None:
    raise ValueError(f"{number} is too much")


def test_the_part_of_the_config_where_a_mistake_came_up_is_named():
    cfg = fdl.Config(dict, parts=[fdl.Config(refuse, 3)])
    with pytest.raises(ConfigError, match=r"^3 is too much \(in parts\[0\]\)$"), user_errors():
        fdl.build(cfg)
