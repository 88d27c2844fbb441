"""Of two processes one asks what lm-eval wants to know, and both compute. Needs lmlib[eval]."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from local_tasks import TASKS, write_tasks
from small_tokenizer import write_tokenizer_folder

import runner
from lmlib import hf
from lmlib.models.families.llama import llama
from lmlib.parallel.mesh import make_mesh
from runner.evaluation.tasks import Tasks, evaluate_tasks
from runner.inference.loaded import load

pytest.importorskip("lm_eval", reason="needs lmlib[eval]")
pytest.importorskip("transformers", reason="needs lmlib[eval]")
pytestmark = pytest.mark.slow

ROOT = Path(runner.__file__).parents[1]
PROCESS = """
import json, sys
import jax

folder, tasks, names, port, index = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", 2, int(index))
from lmlib.parallel.mesh import make_mesh
from runner.command_line.errors import ConfigError
from runner.evaluation.tasks import Tasks, evaluate_tasks
from runner.inference.loaded import load

loaded = load(folder, mesh=make_mesh(fsdp=2, tensor=2))
found = evaluate_tasks(loaded, Tasks(tuple(names.split(",")), tasks), bootstrap_iters=0)
try:
    evaluate_tasks(loaded, Tasks(("no_such_task",), tasks))
except ConfigError as error:
    told = str(error)
print(json.dumps([found and found["results"], told], default=str))
"""


def run_two(*arguments: object) -> list[list]:
    """What the last line says that each of two processes prints."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2 "
        "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0",
    }
    children = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, *map(str, (*arguments, port, index))],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    lines = []
    for child in children:
        output, errors = child.communicate(timeout=400)
        assert child.returncode == 0, errors
        lines.append(json.loads(output.splitlines()[-1]))
    return lines


def test_two_processes_find_what_one_finds(tmp_path):
    tasks = write_tasks(tmp_path / "tasks")
    vocab = write_tokenizer_folder(tmp_path / "tokenizer", begins=True)
    model = llama(vocab=vocab, embed=32, layers=1, heads=4, mlp=32, key=jax.random.key(0))
    folder = tmp_path / "model"
    hf.save(model, folder, tokenizer=tmp_path / "tokenizer", dtype="float32", longest=64)
    (found, told), (nothing, also_told) = run_two(folder, tasks, ",".join(TASKS))
    assert nothing is None  # the second process asked nothing
    assert told == also_told and "there is no task no_such_task" in told
    loaded = load(str(folder), mesh=make_mesh())
    expected = evaluate_tasks(loaded, Tasks(TASKS, str(tasks)), bootstrap_iters=0)["results"]
    for task in TASKS:
        for metric, value in expected[task].items():
            if isinstance(value, float):
                assert found[task][metric] == pytest.approx(value, rel=1e-4), (task, metric)
