"""Every number of a run has a meaning, and the page of docs that lists them says the same."""

from pathlib import Path

import pytest

from lmlib.metrics.meanings import MEANINGS, markdown, meaning

ROOT = Path(__file__).parents[1]


def test_the_table_of_running_md_is_that_of_the_code():
    page = (ROOT / "docs/running.md").read_text("utf-8")
    assert "\n".join(markdown()) in page, "put the lines of lmlib.metrics.meanings.markdown() there"


def test_no_metric_is_explained_twice():
    names = [each.name for each in MEANINGS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("loss", "nats per target token"),
        ("evaluation_loss/NAME", "nats per target token"),
        ("evaluation_loss/code", "nats per target token"),
        ("evaluation_tokens_per_second", "1/s"),
        ("grad_norm/layer 3", ""),
        ("step_flops", "FLOPs"),
    ],
)
def test_units(name, unit):
    assert meaning(name).unit == unit


def test_what_is_not_ours_has_no_meaning():
    assert meaning("accuracy") is None and meaning("evaluation_accuracy") is None
    assert meaning("loss/3") is None
