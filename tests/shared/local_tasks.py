"""Tasks of lm-eval that need no network: a YAML file and lines of JSON each."""

import json
from pathlib import Path

from small_tokenizer import TEXTS

_QUESTIONS = [
    ("Which of these is a fruit?", ["stone", "apple", "the bridge"], 1),
    ("Where is the old mill? ", ["by the river", "at the market"], 0),  # a space at the end
    ("How many houses were there in 1984?", ["3", "3,141", "5,926", "none"], 1),
    ("Où est la gare?", ["à Paris", "naß"], 0),
    ("x = ", ["1", "2", "12"], 2),
    (" ".join(TEXTS), ["The end.", "No end."], 0),  # longer than the model takes
]
_TASKS = {
    "choices": (
        {
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{label}}",
            "num_fewshot": 1,
            "fewshot_split": "test",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        [dict(zip(("question", "choices", "label"), each, strict=True)) for each in _QUESTIONS],
    ),
    "rolling": (
        {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [
                {"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")
            ],
        },
        [{"text": text} for text in [*TEXTS, " ".join(TEXTS), "<|end|>a"]],
    ),
    "no_context": (
        {
            "output_type": "loglikelihood",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
        },
        [{"text": text} for text in TEXTS[:3]],
    ),
    "writing": (
        {
            "output_type": "generate_until",
            "doc_to_text": "{{text[:20]}}",
            "doc_to_target": "{{text[20:].split('a')[0]}}",
            "generation_kwargs": {
                "until": ["a", "\n", "the"],
                "max_gen_toks": 20,
                "do_sample": False,
            },
            "metric_list": [{"metric": "exact_match"}, {"metric": "bleu"}],
        },
        [{"text": text} for text in [*TEXTS, "The"]],
    ),
    "writing_on": (
        {
            "output_type": "generate_until",
            "doc_to_text": "{{text}}",
            "doc_to_target": "the mill",
            "generation_kwargs": {"until": [], "max_gen_toks": 31},
            "metric_list": [{"metric": "exact_match"}, {"metric": "bleu"}],
        },
        [{"text": text} for text in [" ".join(TEXTS), *TEXTS]],  # longer than the model takes
    ),
}
DRAWN = "writing_drawn"  # random, if what the model's folder says leaves more than one token
_TASKS[DRAWN] = (
    {
        **_TASKS["writing"][0],
        "generation_kwargs": {
            "until": [], "max_gen_toks": 20, "do_sample": True, "temperature": 0.7
        },
    },
    _TASKS["writing"][1],
)  # fmt: skip
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
