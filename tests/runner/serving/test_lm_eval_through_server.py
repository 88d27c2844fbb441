"""lm-eval's client of OpenAI's API gets from the server what lm-eval gets in this process."""

import pytest
from local_tasks import TASKS, assert_same_answers, write_tasks
from running_server import is_idle, running_server
from taught_model import write_taught_model

from runner.evaluation.tasks import Tasks, evaluate_tasks
from runner.inference.loaded import load

lm_eval = pytest.importorskip("lm_eval", reason="needs lmlib[eval]")
pytest.importorskip("tenacity", reason="needs lm-eval[api]")
pytest.importorskip("uvicorn", reason="needs lmlib[serve]")
pytestmark = pytest.mark.slow

LENGTH = 512  # more than any question has: the client cuts long ones elsewhere
QUIET = {"bootstrap_iters": 0, "log_samples": True}


@pytest.mark.parametrize("concurrent", [1, 6])
def test_lm_eval_through_the_server_equals_lm_eval_in_process(tmp_path, monkeypatch, concurrent):
    from lm_eval.tasks import TaskManager

    folder = write_taught_model(tmp_path / "model", begins=False, longest=LENGTH)
    tasks = write_tasks(tmp_path / "tasks")
    expected = evaluate_tasks(load(str(folder)), Tasks(TASKS, include_path=str(tasks)), **QUIET)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with running_server({"model": folder}, length=LENGTH) as served:
        found = lm_eval.simple_evaluate(
            "local-completions",
            model_args={
                "model": "model",
                "base_url": f"{served.url}/v1/completions",
                "tokenizer": str(folder),
                "tokenizer_backend": "huggingface",
                "max_length": LENGTH,
                "num_concurrent": concurrent,
            },
            tasks=list(TASKS),
            batch_size=2,
            task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
            **QUIET,
        )
        assert is_idle(served.service)
        assert served.service.load()["model"].tokens > 100
    for task in TASKS:
        for metric, value in expected["results"][task].items():
            if isinstance(value, float):
                assert found["results"][task][metric] == pytest.approx(value, rel=1e-4, abs=1e-4)
        pairs = zip(found["samples"][task], expected["samples"][task], strict=True)
        for one, other in pairs:
            assert_same_answers(one["resps"], other["resps"])
