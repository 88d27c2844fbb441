"""nanochat's dial for depth, against counts of the models themselves."""

import re
from pathlib import Path

import fiddle as fdl
import jax
import pytest

from experiments import nanochat_d12
from lmlib.parallel.axes import map_weights


@pytest.mark.parametrize(
    ("depth", "ratio", "step", "width"), [(12, 12.0, 2**19, 768), (24, 8.0, 2**20, 1_536)]
)
def test_sizes_tokens_and_batch_follow_from_depth(depth, ratio, step, width):
    """The width is 64 · depth, and tokens are a multiple of the weights in matrices."""
    cfg = nanochat_d12.config(depth=depth, tokens_per_parameter=ratio)
    assert (cfg.model.embed, cfg.model.heads, cfg.model.mlp) == (width, width // 128, 4 * width)
    assert cfg.data.batch_size * cfg.data.sequence_length == step
    sizes = {}
    make = fdl.build(cfg.model)
    model = jax.eval_shape(lambda: make(key=jax.random.key(0)))
    map_weights(lambda w, x: sizes.update({w.path: (w, x.size)}), model)
    counted = sum(size for weight, size in sizes.values() if weight.declaration.multiplied)
    assert cfg.steps == int(ratio * counted) // step
    # nanochat's Muon has a rate of 0.02 at depth 12, which grows with the root of the batch.
    assert cfg.optimizer.peak_lr * 0.2 * width**0.5 == pytest.approx(0.02 * (step / 2**19) ** 0.5)


def test_windows_are_whole_tiles_and_the_token_itself():
    assert nanochat_d12.config(sequence_length=2_048).model.window == 513
    assert nanochat_d12.config(sequence_length=1_000).model.window == 257
    assert nanochat_d12.config(depth=1).model.embed == 128
    with pytest.raises(ValueError, match="at least 1 and tokens_per_parameter positive, got 0 and"):
        nanochat_d12.config(depth=0)


def test_a_published_run_has_as_many_steps():
    """Run 3 of nanochat's dev/LEADERBOARD.md, before its gates had 12 inputs."""
    cfg = nanochat_d12.config(depth=26, tokens_per_parameter=8.25)
    assert cfg.data.batch_size * cfg.data.sequence_length == 1_048_576
    assert abs(cfg.steps - 7_226) <= 1


@pytest.mark.slow
def test_the_tasks_of_core_exist():
    tasks = pytest.importorskip("lm_eval.tasks")
    page = Path(__file__).parents[2] / "docs" / "recipes.md"
    lists = re.findall(r"--tasks=(\S+)", page.read_text().replace("\\\n    ", ""))
    names = ",".join(lists).split(",")
    assert len(names) == 21
    assert {*names} <= {*tasks.TaskManager().all_tasks}
