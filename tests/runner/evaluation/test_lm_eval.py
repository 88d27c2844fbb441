"""lm-eval gives the same numbers as with its own backend `hf`. Needs lmlib[eval,parity]."""

import functools
import json
import shutil

import jax
import pytest
from laid_out import drawn
from local_tasks import DRAWN, TASKS, assert_same_answers, write_tasks
from small_tokenizer import write_tokenizer_folder
from taught_model import write_taught_model
from two_processes import run_two

from lmlib import hf
from lmlib.models.families.llama import llama
from lmlib.parallel.mesh import make_mesh
from runner.errors import ConfigError
from runner.evaluation.tasks import Tasks, evaluate_tasks
from runner.inference.loaded import load

lm_eval = pytest.importorskip("lm_eval", reason="needs lmlib[eval]")
pytest.importorskip("torch", reason="needs lmlib[parity]")
transformers = pytest.importorskip("transformers", reason="needs lmlib[eval]")

QUIET = {"bootstrap_iters": 0, "log_samples": True}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks") / "tasks")


@pytest.fixture(scope="module", params=[True, False], ids=["begins", "only ends"])
def folder(request, tmp_path_factory):
    """A model that has learned a few sentences, with its tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "exported"
    return write_taught_model(folder, begins=request.param)


def theirs(folder, tasks, names=TASKS, **settings):
    from lm_eval.tasks import TaskManager

    return lm_eval.simple_evaluate(
        "hf",
        model_args={"pretrained": str(folder), "device": "cpu", "dtype": "float32"},
        tasks=list(names),
        batch_size=3,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        **settings,
    )


@pytest.mark.slow
@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
def test_all_numbers_equal_those_from_the_hf_backend(folder, tasks, chat):
    found = evaluate_tasks(
        load(str(folder), mesh=make_mesh(fsdp=2, tensor=2)),
        Tasks(TASKS, include_path=str(tasks), chat=chat),
        **QUIET,
    )
    expected = theirs(folder, tasks, apply_chat_template=chat, **QUIET)
    for task in TASKS:
        for metric, value in expected["results"][task].items():
            if isinstance(value, float):
                assert found["results"][task][metric] == pytest.approx(value, rel=1e-4, abs=1e-4)
        pairs = zip(found["samples"][task], expected["samples"][task], strict=True)
        for one, other in pairs:
            assert one["arguments"] == other["arguments"]
            assert_same_answers(one["resps"], other["resps"])


SAID = [
    {"repetition_penalty": 1.7, "max_new_tokens": 45},  # more than the model's sequences have
    {"repetition_penalty": 0.6, "max_new_tokens": 9, "do_sample": True, "temperature": 0.1},
]
ONE_FOLDER = pytest.mark.parametrize("folder", [True], indirect=True, ids=["begins"])


@pytest.mark.slow
@ONE_FOLDER
def test_generation_config_is_used_like_in_the_hf_backend(folder, tasks, tmp_path):
    """A task that samples with top_k = 1 has only one token to choose."""
    names = ("writing", "writing_on", DRAWN)

    def answers(results):
        return [[sample["resps"] for sample in results["samples"][name]] for name in names]

    def found(model):
        asked = Tasks(names, str(tasks))
        return answers(evaluate_tasks(load(str(model)), asked, show=told.append, **QUIET))

    told: list[str] = []
    without = found(folder)
    changed = shutil.copytree(folder, tmp_path / "changed")
    content = json.loads((folder / "generation_config.json").read_text())
    for said in SAID:
        content |= {"top_k": 1, "typical_p": 1.0, **said}
        (changed / "generation_config.json").write_text(json.dumps(content))
        expected = answers(theirs(changed, tasks, names, **QUIET))
        assert found(changed) == expected
        assert all(one != other for one, other in zip(expected, without, strict=True))
    assert not told


@pytest.mark.slow
@ONE_FOLDER
def test_ignored_keys_of_generation_config_are_named(folder, tasks, tmp_path):
    changed, told = shutil.copytree(folder, tmp_path / "changed"), []
    content = {"no_repeat_ngram_size": 2, "num_beams": 1, "typical_p": 0.5, "bad_words_ids": None}
    (changed / "generation_config.json").write_text(json.dumps(content))
    for name in ("writing", DRAWN):
        asked = Tasks((name,), str(tasks), limit=1)
        evaluate_tasks(load(str(changed)), asked, show=told.append, **QUIET)
    assert [line.partition(" has ")[2].partition(": ignored")[0] for line in told] == [
        "no_repeat_ngram_size=2",
        "no_repeat_ngram_size=2, typical_p=0.5",
    ]
    (changed / "generation_config.json").write_text('{"repetition_penalty": "a"}')
    with pytest.raises(ConfigError, match=f"of {changed} has repetition_penalty='a': it must be"):
        evaluate_tasks(load(str(changed)), Tasks(TASKS, str(tasks)), **QUIET)


PROCESS = """
import json, sys
import jax

folder, tasks, names, address, index = sys.argv[1:]
jax.distributed.initialize(address, 2, int(index))
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


@pytest.mark.slow
def test_two_processes_get_the_same_results_as_one(tmp_path):
    tasks = write_tasks(tmp_path / "tasks")
    vocab = write_tokenizer_folder(tmp_path / "tokenizer", begins=True)
    make = functools.partial(llama, vocab=vocab, embed=32, layers=1, heads=4, mlp=32)
    model = drawn(jax.eval_shape(make, key=jax.random.key(0)))
    folder = tmp_path / "model"
    hf.save(model, folder, tokenizer=tmp_path / "tokenizer", dtype="float32", longest=64)
    lines = run_two(PROCESS, folder, tasks, ",".join(TASKS))
    (found, told), (also_found, also_told) = map(json.loads, lines)
    assert found == also_found  # each process asks all questions
    assert told == also_told and "there is no task no_such_task" in told
    loaded = load(str(folder), mesh=make_mesh())
    expected = evaluate_tasks(loaded, Tasks(TASKS, str(tasks)), bootstrap_iters=0)["results"]
    for task in TASKS:
        for metric, value in expected[task].items():
            if isinstance(value, float):
                assert found[task][metric] == pytest.approx(value, rel=1e-4), (task, metric)
    with pytest.raises(ConfigError, match="none is not a folder"):
        evaluate_tasks(loaded, Tasks(TASKS, str(tmp_path / "none")))
