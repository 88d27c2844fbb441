"""Of two processes one asks what lm-eval wants to know, and both compute. Needs lmlib[eval]."""

import functools
import json

import jax
import pytest
from laid_out import drawn
from local_tasks import TASKS, write_tasks
from small_tokenizer import write_tokenizer_folder
from two_processes import run_two

from lmlib import hf
from lmlib.models.families.llama import llama
from lmlib.parallel.mesh import make_mesh
from runner.evaluation.tasks import Tasks, evaluate_tasks
from runner.inference.loaded import load

pytest.importorskip("lm_eval", reason="needs lmlib[eval]")
pytest.importorskip("transformers", reason="needs lmlib[eval]")
pytestmark = pytest.mark.slow

PROCESS = """
import json, sys
import jax

folder, tasks, names, port, index = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", 2, int(index))
from lmlib.parallel.mesh import make_mesh
from runner.errors import ConfigError
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


def test_two_processes_find_what_one_finds(tmp_path):
    tasks = write_tasks(tmp_path / "tasks")
    vocab = write_tokenizer_folder(tmp_path / "tokenizer", begins=True)
    make = functools.partial(llama, vocab=vocab, embed=32, layers=1, heads=4, mlp=32)
    model = drawn(jax.eval_shape(make, key=jax.random.key(0)))
    folder = tmp_path / "model"
    hf.save(model, folder, tokenizer=tmp_path / "tokenizer", dtype="float32", longest=64)
    lines = run_two(PROCESS, folder, tasks, ",".join(TASKS))
    (found, told), (nothing, also_told) = map(json.loads, lines)
    assert nothing is None  # the second process asked nothing
    assert told == also_told and "there is no task no_such_task" in told
    loaded = load(str(folder), mesh=make_mesh())
    expected = evaluate_tasks(loaded, Tasks(TASKS, str(tasks)), bootstrap_iters=0)["results"]
    for task in TASKS:
        for metric, value in expected[task].items():
            if isinstance(value, float):
                assert found[task][metric] == pytest.approx(value, rel=1e-4), (task, metric)
