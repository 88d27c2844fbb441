"""Tasks of lm-eval that need no network: a YAML file and lines of JSON each."""

import json
from pathlib import Path

import pytest
from small_tokenizer import TEXTS

_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_LONG = " ".join(TEXTS)  # longer than the model takes
_ROWS = {
    "choices": [
        {"question": question, "choices": choices, "label": label}
        for question, choices, label in _TABLES["questions"]
    ],
    "rolling": [{"text": text} for text in [*TEXTS, _LONG, "<|end|>a"]],
    "no_context": [{"text": text} for text in TEXTS[:3]],
    "writing": [{"text": text} for text in [*TEXTS, "The"]],
    "writing_on": [{"text": text} for text in [_LONG, *TEXTS]],
}
_TASKS = {name: (task, _ROWS[name]) for name, task in _TABLES["tasks"].items()}
DRAWN = "writing_drawn"  # random, unless the model's folder allows only one token
_DRAWS = {"until": [], "max_gen_toks": 20, "do_sample": True, "temperature": 0.7}
_TASKS[DRAWN] = (_TASKS["writing"][0] | {"generation_kwargs": _DRAWS}, _ROWS["writing"])
TASKS = tuple(name for name in _TASKS if name != DRAWN)


def write_tasks(folder: Path) -> Path:
    """Writes all `TASKS`, and `DRAWN`."""
    folder.mkdir()
    for name, (task, rows) in _TASKS.items():
        lines = folder / f"{name}.jsonl"
        lines.write_text("\n".join(map(json.dumps, rows)))
        files = {"data_files": {"test": str(lines)}, "cache_dir": str(folder / "cache")}
        whole = {"task": name, "dataset_path": "json", "dataset_kwargs": files, **task}
        whole |= {"test_split": "test", "metadata": {"version": 1}}
        (folder / f"{name}.yaml").write_text(json.dumps(whole))  # which is YAML
    return folder


def assert_same_answers(one, other):
    """Texts are the same; log-probabilities are to 1e-4."""
    assert type(one) is type(other)
    if isinstance(one, list | tuple):
        assert len(one) == len(other)
        for each, its in zip(one, other, strict=True):
            assert_same_answers(each, its)
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-4)
    else:
        assert one == other
