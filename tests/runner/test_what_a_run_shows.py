"""The lines of a whole run: rates, validation, phases, saves, and the log that keeps them."""

import hashlib

import fiddle as fdl
import pytest
from byte_texts import write_texts
from small_experiment import small

from lmlib.data.batch import Batch
from lmlib.data.flat_tokens import FlatTokens
from runner import fit
from runner.training import saving

pytestmark = pytest.mark.slow


class Slow(FlatTokens):
    """Batches that take longer than the step that is made of them."""

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000)
        return super().batch(step, rows)


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    """The metrics of a run of 4 steps and 2 more, and its log."""
    folder = tmp_path_factory.mktemp("shown")
    write_texts(folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        for steps, held_up in ((4, 1e6), (6, 0.0)):
            patch.setattr(saving, "HELD_UP_SECONDS", held_up)
            often = ("checkpoints.every=3", "evaluation.every=2", "prefetch_batches=1")
            cfg = small(f"steps={steps}", *often)
            cfg.data = fdl.Config(Slow, str(folder / "data"), "train", 4, 16)
            cfg.validation = fdl.Config(FlatTokens, str(folder / "data"), "train", 4, 16)
            result = fit(cfg, folder / "run")
    logs = (folder / "run" / "run.log").read_text().split("=== start of process")
    return result.metrics, logs[1:]


def test_the_time_of_a_step_holds_its_own_wait_for_data(starts):
    """Also of the first and the last before a save: their rates are those of the others."""
    metrics, _ = starts
    assert len(metrics) == 6 and any(line["data_wait_seconds"] > 0 for line in metrics)
    assert all(line["step_seconds"] >= line["data_wait_seconds"] for line in metrics)


def test_validation_is_shown_where_it_comes(starts):
    metrics, logs = starts
    for line, log in ((metrics[3], logs[0]), (metrics[5], logs[1])):
        loss, bits = line["evaluation_loss"], line["evaluation_bits_per_byte"]
        found = f"evaluation loss {loss:.4f} nats per token  {bits:.3f} bits per byte"
        assert f"{found}  over the first " in log


def test_new_weights_are_not_called_restored(starts):
    _, (first, second) = starts
    assert " s initialisation" in first and "restore" not in first
    assert " s initialisation" not in second and "resuming after step 4 of 6" in second


def test_a_save_is_mentioned_only_if_it_held_training_up(starts):
    _, (first, second) = starts
    assert "held training up" not in first
    assert "saving step 6 held training up for " in second


def test_the_log_has_the_lines_of_every_start(starts):
    _, logs = starts
    assert [f"  step 1/{steps}  loss" in log for steps, log in zip((4, 6), logs, strict=True)] == [
        True,
        False,
    ]
    assert all("the config has changed" in log for log in logs[1:])
    assert "step 6/6" in logs[1]
