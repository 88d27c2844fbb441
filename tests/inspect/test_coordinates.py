"""The coordinate check: what first steps change stays with CompleteP, and does not without."""

import functools
import itertools
import math

import jax
import numpy as np
import pytest

from lmlib.compute import Compute
from lmlib.data.synthetic import Synthetic
from lmlib.experiment import Experiment
from lmlib.inspect.coordinates import LOOKED_AT, changes, slope
from lmlib.inspect.inspector import Inspector
from lmlib.models.families.llama import llama
from lmlib.optim.adamw import adamw
from lmlib.optim.schedules import warmup_constant
from lmlib.optim.transfer import CompleteP
from lmlib.parallel.mesh import make_mesh
from lmlib.report.pictures import coordinates, write_picture
from lmlib.train import make_step

BASE = {"embed": 32, "heads": 2, "mlp": 64, "layers": 2}


def experiment(scaling=True, steps=3, **sizes):
    return Experiment(
        functools.partial(llama, vocab=64, **BASE | sizes),
        Synthetic(64, batch_size=4, sequence_length=32),
        functools.partial(adamw, peak_lr=4e-3, schedule=warmup_constant),
        make_mesh(devices=jax.devices()[:1]),
        steps,
        compute=Compute(dtype="float32"),
        scaling=CompleteP(BASE) if scaling else None,
    )


@pytest.mark.slow
def test_changes_of_logits_by_hand():
    made = experiment(embed=16, heads=1, mlp=32, layers=1, steps=2)
    found = changes(made)
    assert found.keys() == set(LOOKED_AT)
    ids, step, state = made.data.batch(0), make_step(made.training), made.initial_state()

    def logits(model):
        inspector, rows = Inspector(model), zip(ids.tokens, ids.segment_ids, strict=True)
        documents = [row[of == each].tolist() for row, of in rows for each in np.unique(of)]
        return np.concatenate([inspector.logits(document) for document in documents])

    before = logits(state.model)
    for number in range(2):
        state, _ = step(state, made.data.batch(number))
        expected = math.sqrt(np.mean(np.square(logits(state.model) - before)))
        assert found["logits"][number] == pytest.approx(expected, rel=1e-4)


def test_slope_finds_the_exponent():
    sizes = [64, 128, 512]
    assert slope(sizes, [3 * size**0.5 for size in sizes]) == pytest.approx(0.5)
    assert slope(sizes, [7.0, 7.0, 7.0]) == pytest.approx(0)
    assert math.isnan(slope(sizes, [1.0, 0.0, 1.0])) and math.isnan(slope([64], [1.0]))


@functools.cache
def changes_of(scaling, *sizes):
    return changes(experiment(scaling, **dict(sizes)))


def exponents(scaling, sizes):
    found = [changes_of(scaling, *(BASE | each).items()) for each in sizes.values()]
    return {name: slope([*sizes], [each[name][-1] for each in found]) for name in LOOKED_AT}


WIDTHS = {size: {"embed": size, "heads": size // 16, "mlp": 2 * size} for size in (32, 64, 128)}
DEPTHS = {size: {"layers": size} for size in (2, 4, 8)}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [WIDTHS, DEPTHS], ids=["width", "depth"])
def test_changes_stay_with_the_rule_and_grow_without(sizes):
    ruled, own = exponents(True, sizes), exponents(False, sizes)
    for name in ("embedding", "middle layer", "last layer"):
        assert abs(ruled[name]) < 0.2, ruled
    # By the rule, the first unembedding's response to changes falls as the root of width.
    assert -0.45 < ruled["logits"] < 0.2, ruled
    assert own["last layer"] > 0.4 and own["middle layer"] > 0.4, own


@pytest.mark.slow
def test_pictures_have_a_line_per_step_and_skip_infinite_values(tmp_path):
    names = ("by", "size", "looked_at", "step")
    cases = itertools.product(("width", "depth"), (1, 2), LOOKED_AT, (1, 2))
    rows = [dict(zip(names, case, strict=True), rule="with", change=0.1) for case in cases]
    rows += [{**rows[0], "change": bad} for bad in (0.0, math.inf, math.nan)]
    charts = coordinates(rows)["vconcat"]
    assert [len(chart["data"]["values"]) for chart in charts] == [16, 16]
    for name in ("check.png", "check.svg"):
        write_picture(coordinates(rows), tmp_path / name)
    assert (tmp_path / "check.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "check.svg").read_text()
    assert all(name in svg for name in LOOKED_AT)
    with pytest.raises(ValueError, match=r"ends in \.svg or \.png"):
        write_picture(coordinates(rows), tmp_path / "check.pdf")
