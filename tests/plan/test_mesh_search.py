"""The search over meshes, on simulated devices."""

import dataclasses
import functools
import re

import pytest

from lmlib.data.synthetic import Synthetic
from lmlib.experiment import Experiment
from lmlib.models.families.experts.mixtral import mixtral
from lmlib.optim.adamw import adamw
from lmlib.parallel.mesh import make_mesh
from lmlib.parallel.other_meshes import divisions
from lmlib.plan.planner import plan
from lmlib.plan.search import search_meshes
from lmlib.plan.targets import parse
from lmlib.terminal.quantities import bytes_text


def experiment(devices: int) -> Experiment:
    model = functools.partial(
        mixtral, vocab=64, embed=32, layers=1, heads=2, mlp=32, experts=4, top=2
    )
    return Experiment(
        model=model,
        data=Synthetic(64, 8, 32),
        optimizer=functools.partial(adamw, peak_lr=1e-3),
        mesh=make_mesh(fsdp=devices),
        steps=10,
    )


def test_every_division_is_tried_once_and_other_axes_stay():
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    found = [dict(one.shape) for one in divisions(mesh, ["expert", "tensor"])]
    by_hand = [(fsdp, expert, 4 // (fsdp * expert)) for fsdp in (1, 2, 4) for expert in (1, 2, 4)]
    assert {(one["fsdp"], one["expert"], one["tensor"]) for one in found} == {
        sizes for sizes in by_hand if sizes[0] * sizes[1] * sizes[2] == 4
    }
    assert len(found) == 6
    assert all(one["data"] == 2 for one in found)


@pytest.mark.slow
def test_the_table_has_what_a_plan_of_each_mesh_has():
    target = parse("cpu:8")
    search = search_meshes(experiment(8), target, ["expert"])
    trial_by_expert = {trial.sizes["expert"]: trial for trial in search.trials}
    assert set(trial_by_expert) == {1, 2, 4, 8}
    assert "8" in trial_by_expert[8].outcome  # there are 4 experts
    for expert in (1, 4):
        mesh = make_mesh(fsdp=8 // expert, expert=expert)
        report = plan(dataclasses.replace(experiment(8), mesh=mesh), target)
        found = trial_by_expert[expert].outcome
        assert found.memory == report.memory and found.collectives == report.collectives
        (line,) = re.findall(rf"^fsdp {8 // expert}.*$", str(search), re.MULTILINE)
        assert (f"expert {expert}" in line) == (expert > 1)
        assert bytes_text(report.collectives.bytes_sent_per_step) in line


@pytest.mark.parametrize("axis", ["fsdp", "experts"])
def test_what_is_no_axis_is_said(axis):
    with pytest.raises(ValueError, match=f"'{axis}' is no axis to try sizes of"):
        search_meshes(experiment(8), parse("cpu:8"), [axis])
