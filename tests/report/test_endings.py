"""A run that ends before its last step leaves a page that says how, why and after which step."""

import html

import pytest
from small_experiment import small

from lmlib.report import seen
from runner import fit
from runner.errors import StoppedEarly, TrainingStopped
from runner.training.options import Options


def fails(step):
    if step == 3:
        raise RuntimeError("a <b> of the user's")
    return False


@pytest.mark.landing
@pytest.mark.parametrize(
    ("overrides", "stop", "error", "told"),
    [
        (["optimizer.peak_lr=1e30", "guard.stop_after=3"], None, TrainingStopped, "diverged, step"),
        ([], lambda step: step == 3, StoppedEarly, "interrupted, step 3 of 12"),
        ([], fails, RuntimeError, "failed, step 2 of 12"),
    ],
)
def test_a_run_that_ends_early(tmp_path, overrides, stop, error, told):
    with pytest.raises(error) as caught:
        fit(small("steps=12", *overrides), tmp_path, Options(**({"stop": stop} if stop else {})))
    text = (tmp_path / "report.html").read_text()
    reason = str(caught.value).splitlines()[0]
    assert told in text and reason in html.unescape(text)
    if error is StoppedEarly:
        fit(small("steps=12"), tmp_path)
        assert ">finished<" in (tmp_path / "report.html").read_text()
        assert seen([tmp_path])[0].run.state == ("finished", "")
