"""Every block of code and every command of README and docs/ runs as it is printed.

Each page has a folder of its own and goes from top to bottom: its commands, then its Python in one
process. Names that stand for the reader's own files get those of `documented_world`, and runs are
made short. What cannot run here is listed below with the reason; its flags are checked too.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from compiled_programs import XLA_FLAGS
from documented_blocks import PAGES, ROOT, Block, blocks, words
from documented_world import make_world
from forked_processes import Ended, run_forked
from sentinels import sentinels

# Names on a page, and what has it here, unless a command of the page makes it.
STANDS_FOR = {
    "DIR_OR_FILES_OR_HF_NAME": "texts",
    "TEXT_OR_FLAT_TOKENS": "texts",
    "OTHER_TEXTS": "texts",
    "TEXTS": "texts",
    "TEXT_FILE": "texts.txt",
    "RUN_OR_FOLDER": "run",
    "MODEL": "run",
    "RUN": "run",
    "WORKDIR": "run",
    "SWEEP": "sweep",
    "LADDER": "ladder",
    "DATA": "data",
    "TOKENS": "data",
    "SEQAX_DIR": "seqax",
    "CHATS": "chats.jsonl",
    "PROMPTS.jsonl": "prompts.jsonl",
    "TOK_WITH_TEMPLATE": "templated",
    "Qwen/Qwen3-0.6B": "qwen",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "templated",
    "docs": "texts",
    "README.md": "texts.txt",
    "path/to/folder": "qwen",
    "data/c4": "data",
    "data/code": "data",
    "data/web": "data",
    "/tmp/quickstart": "run",
    "/tmp/run": "run",
    "/tmp/query_key_norms": "question",
    "/tmp/ladder": "ladder",
}
# What would take long or more devices, in the order of replacement.
# README.md's first run, .ci/run makes whole.
SHORTER = (
    (r"@\d+", "@2"),
    (r"--fdl\.steps=\d+", "--fdl.steps=4"),
    (r"checkpoints\.every=\d+", "checkpoints.every=2"),
    (r"stable\(decay=\d+\)", "stable(decay=1)"),
    (r"--profile=20:24", "--profile=2:3"),
    (r"(--fdl_config=experiments/\w+)(?!.*--fiddler=tiny)", r"\1 --fiddler=tiny"),
    (r"(-m runner(?:\.sweep)? --fdl_config=experiments/.*--fiddler=tiny)",
     r"\1 --fdl.samples.prompts=()"),
    (r"(-m runner --fdl_config=experiments/(?!.*(?:--fdl\.steps|later_stage)).*--fiddler=tiny)",
     r"\1 --fdl.steps=3"),
    (r"(experiments/(?:quickstart|quickstart_experts|distil) --fiddler=tiny)(?!.*stage=)",
     r"\1 --fdl.model.layers=1 --fdl.compute.unroll=1"),
    (r"(--fiddler=stored)", r"\1 --fdl.data.teacher=taught --fdl.validation.teacher=taught2"),
    (r"(--fdl_config=tmp/.*)", r"\1 --fdl.steps=1 --fdl.data.batch_size=8 --fdl.validation=None "
     "--fdl.data.sequence_length=16"),
    (r"(longer_rows\(|--sequence_length=)4096", r"\g<1>128"),
    (r"--vocab_size=\d+", "--vocab_size=300"),
    (r"(-m data_tools\.pretokenize)(?!.*--(?:workers|ray))", r"\1 --workers=0"),
    (r"(fsdp|expert)=8", r"\1=1"),
    (r"in \(1e-3, 3e-3\)", "in (1e-3,)"),
    (r"sequence_length=1024", "sequence_length=64"),
    (r"--axis=depth=[\d,]+", "--axis=depth=2,3"),
    # As tests/runner/test_coordinate_check.py, so that one finds the programs of the other.
    (r"--steps=20 (.*)--widths=[\d,]+ --depths=[\d,]+", r"--steps=2 \1--widths=32,64 --depths=1,2 "
     "--fdl.data.batch_size=8 --fdl.scaling.base="
     "\"{'embed': 64, 'heads': 4, 'mlp': 128, 'layers': 2}\""),
)  # fmt: skip
INSTALLS = "it installs packages, or needs one that is not there"
HUB = "it reads from Hugging Face's Hub"
LONG = "it compiles for absent hardware, for minutes"
# Commands that do not run here, by how they begin.
NOT_RUN = {
    "README.md": {
        "git clone": "it needs the address of a repository",
        "python3 -m venv .venv": INSTALLS,
    },
    "docs/clusters.md": {
        "sbatch": "tests/clusters/test_slurm.py does",
        "python -m runner.sweep": "tests/clusters/test_slurm.py does",
        "kubectl": "it needs a cluster",
        "docker": "it needs Docker",
        "python clusters/ray_train.py": "tests/clusters/test_ray_train.py does",
        "sky": "it needs SkyPilot and a cloud",
    },
    "docs/buckets.md": {"python -m runner": "it needs a bucket: tests/runner/test_in_bucket.py"},
    "docs/data.md": {
        "python -m data_tools.pretokenize --dataset=allenai/c4": HUB,
        "python -m data_tools.pretokenize --dataset=/shared/text": "it is for SLURM and Ray",
        "#SBATCH": "it is for SLURM",
    },
    "docs/evaluation.md": {
        "pip install": INSTALLS,
        "python -m runner.evaluate --from=RUN_OR_FOLDER --tasks": HUB,
    },
    "docs/experts.md": {
        "python -m runner.plan": LONG,
        "python benchmarks/train_step.py": "it measures for minutes",
    },
    "docs/long-context.md": {"python -m runner.plan": LONG},
    "docs/faults.md": {"python -m runner.replay": "it needs a skipped update: test_captures.py"},
    "docs/finetuning.md": {
        "python -m runner.convert --from=/tmp/llama_8b_lora": "its base is a folder on the Hub: "
        "test_adapter_folders.py",
    },
    "docs/generation.md": {"python benchmarks/generate.py": "it measures for an hour"},
    "docs/huggingface.md": {
        "python -m runner.convert --from=RUN --to=PEFT_DIR": "test_adapter_folders.py has adapters",
        "python -m runner.convert --from=PEFT_DIR": "test_adapter_folders.py has adapters",
        "python -m runner.convert --from=FOLDER --to=RUN": "test_own_families.py does",
    },
    "docs/install.md": {"python3 -m venv .venv": INSTALLS},
    "docs/multihost.md": {
        "export JAX_PLATFORMS=cpu": "test_processes.py starts several",
    },
    "docs/notebook.md": {"python -m runner --fdl_config=experiments/quickstart": "README.md does"},
    "docs/performance.md": {"pip install": INSTALLS, "python -m runner.plan": LONG},
    "docs/pictures.md": {"python -m runner.watch WORKDIR": "it serves: test_server.py"},
    "docs/research.md": {"python -m runner.sweep": "it trains for a quarter of an hour"},
    "docs/scaling.md": {"pip install": INSTALLS},
    "docs/recipes.md": {"python -m runner.plan": LONG},
    "docs/your-own-architecture.md": {"python -m runner.plan": LONG},
}
# Python that is an excerpt of a file: test_documentation.py compares those of huggingface.md.
EXCERPTS = {
    "docs/huggingface.md": (
        "return transformer(", "_LAYER = (", "FAMILIES = (", "*starcoder", '"starcoder2"',
    ),
    "docs/running.md": ("class GatedMLP(",),
}  # fmt: skip
NOT_RUN_PYTHON = {
    "docs/data.md": {"from data_tools.hf_stream": HUB},
    "docs/huggingface.md": {
        "from lmlib import hf\nfrom lmlib.adapters": "test_peft.py does it",
        "from transformers import AutoModelForCausalLM, Mxfp4Config": HUB,
    },
}
# What a reader has in hand before the Python of a page.
IN_HAND = {
    page: "from experiments import llama_84m\ncfg = llama_84m.config()\n"
    for page in (
        "docs/optimizers.md",
        "docs/evaluation.md",
        "docs/experts.md",
        "docs/finetuning.md",
        "docs/objectives.md",
    )
}
COMMAND = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:git clone|python3?|pip|sbatch|kubectl|docker|sky) |#SBATCH|export "
)
FILE = re.compile(r"# (\w+\.py)\n")  # the first line of what goes into a file

SHOWN = {page.relative_to(ROOT).as_posix(): blocks(page) for page in PAGES}


def begins_with(text: str, listed) -> bool:
    return any(text.startswith(beginning) for beginning in listed)


def commands_of(page: str) -> list[tuple[Block, str]]:
    """Each command, and each script as one."""
    found = []
    for block in SHOWN[page]:
        if block.kind == "indented":
            found += [(block, command) for command in block.commands if command]
        elif block.kind == "bash":
            found.append((block, block.text))
    return found


def commands_that_run(page: str) -> list[tuple[Block, str]]:
    return [
        (block, command)
        for block, command in commands_of(page)
        if not begins_with(command, NOT_RUN.get(page, ()))
    ]


def python_of(page: str) -> list[Block]:
    return [block for block in SHOWN[page] if block.kind == "python"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    make_world(folder)
    return folder


def test_blocks_are_seen():
    commands = [each for page in SHOWN for each in commands_of(page)]
    assert len(commands) > 60
    assert len([block for page in SHOWN for block in python_of(page)]) > 15
    no_command = [f"{b.page}:{b.line}: {text}" for b, text in commands if not COMMAND.match(text)]
    assert not no_command, "indented blocks are commands; fence what is not"
    hidden = [
        f"{block.page}:{block.line}"
        for page in SHOWN.values()
        for block in page
        if block.kind not in ("indented", "bash", "python")
        and re.search(r"^(?:\$ )?(?:python|pip) ", block.text, re.MULTILINE)
        and block.page != "docs/flat-tokens.md"  # test_documented_example.py makes that one
    ]
    assert not hidden, "commands are indented, or in a fence of bash"


def test_what_is_listed_as_not_run_is_there():
    for page, listed in NOT_RUN.items():
        shown = [command for _, command in commands_of(page)]
        assert not [each for each in listed if not any(s.startswith(each) for s in shown)]
    for page, listed in (NOT_RUN_PYTHON | EXCERPTS).items():
        shown = [block.text for block in python_of(page)]
        assert not [each for each in listed if not any(s.startswith(each) for s in shown)]


def test_the_excerpt_of_a_part_is_of_the_code():
    page = "docs/running.md"
    (block,) = [b for b in python_of(page) if begins_with(b.text, EXCERPTS[page])]
    assert set(block.text.splitlines()) <= set(
        (ROOT / "lmlib/models/parts/mlp.py").read_text(encoding="utf-8").splitlines()
    )


@pytest.mark.parametrize("page", sentinels(SHOWN, lambda page: page == "README.md"))
def test_commands_have_the_flags_that_they_show(page):
    wrong = []
    for block, command in commands_of(page):
        for line in re.sub(r"\\\n\s*", "", command).splitlines():
            if "python -m runner" not in line and "python -m data_tools" not in line:
                continue
            _, split = words(re.sub(r"\$\w+", "0", line).rstrip(" &"))
            module, *arguments = split[split.index("-m") + 1 :]
            ended = run_forked(ROOT / "tests/shared/check_flags.py", module, *arguments)
            if ended.returncode:
                wrong.append(f"{page}:{block.line}: {line}\n{ended.stderr.splitlines()[-1]}")
    assert not wrong, "\n".join(wrong)


def as_here(page: str, text: str) -> str:
    """`text` with the files of this place, and shorter."""
    made = " ".join(command for _, command in commands_that_run(page))
    for name, here in STANDS_FOR.items():
        if not re.search(rf"--(?:out|workdir)={re.escape(name)}(?![\w/])", made):
            text = re.sub(rf"(?<![\w/.-]){re.escape(name)}(?![\w/-])", here, text)
    text = text.replace("/tmp/", "tmp/")
    for pattern, shorter in SHORTER:
        text = re.sub(pattern, shorter, text)
    return text


def run_command(command: str, folder: Path) -> Ended:
    environment, split = words(command)
    environment = {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", **environment}
    if split[:2] == ["python", "-m"]:
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {XLA_FLAGS}"
        return run_forked(*split[1:], cwd=folder, environment=environment)
    done = subprocess.run(
        ["bash", "-ec", command], cwd=folder, env=os.environ | environment,
        capture_output=True, text=True,
    )  # fmt: skip
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("page", SHOWN)
def test_a_page_runs(page, world, tmp_path):
    folder = tmp_path / "here"
    shutil.copytree(world, folder)
    (folder / "tmp").mkdir()
    python = [block.text for block in python_of(page)]
    for text in python:
        if named := FILE.match(text):
            (folder / named[1]).write_text(text)
    wrong = []
    for block, command in commands_that_run(page):
        here = as_here(page, command)
        ended = run_command(here, folder)
        if ended.returncode:
            wrong.append(f"{page}:{block.line}: {command}\nas {here}\n{ended.stderr[-600:]}")
    left_out = (*NOT_RUN_PYTHON.get(page, ()), *EXCERPTS.get(page, ()))
    run = [as_here(page, text) for text in python if not begins_with(text, left_out)]
    script = folder / "blocks_of_the_page.py"
    script.write_text("\n\n".join([IN_HAND.get(page, ""), *run]))
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "XLA_FLAGS": XLA_FLAGS}
    if run and (ended := run_forked(script, cwd=folder, environment=paths)).returncode:
        wrong.append(f"the Python of {page}\n{ended.stderr[-1500:]}")
    assert not wrong, "\n\n".join(wrong)
