"""What would need less memory: changes of settings, compiled to see, on simulated devices."""

import dataclasses
import functools

import fiddle as fdl
import pytest
from absent_hardware import absent, needs_tpu_compiler

from lmlib.compute import Compute
from lmlib.data.synthetic import Synthetic
from lmlib.experiment import Experiment
from lmlib.hardware.specifications import CPU
from lmlib.models.families.llama import llama
from lmlib.optim.adamw import adamw
from lmlib.parallel.mesh import make_mesh
from lmlib.plan.advice import Advice, Tried, advise, changes
from lmlib.plan.planner import plan
from lmlib.plan.targets import Target
from runner.config import configs
from runner.config.overrides import apply_override

pytestmark = pytest.mark.several_devices
TARGET = Target(dataclasses.replace(CPU, memory_bytes=1_000_000), (4,))


def experiment(**settings):
    made = Experiment(
        model=functools.partial(llama, vocab=64, embed=32, layers=2, heads=2, mlp=128),
        data=Synthetic(64, 8, 64),
        optimizer=functools.partial(adamw, peak_lr=1e-3),
        mesh=make_mesh(data=2, fsdp=2),
        steps=10,
        compute=Compute(saved=("mlp_gate", "attention")),
    )
    return dataclasses.replace(made, **settings)


@pytest.fixture(scope="module")
def planned():
    return plan(experiment(), TARGET)


@pytest.mark.slow
def test_tensor_parallelism_comes_with_split_sequences_and_no_more_of_them_at_a_time(planned):
    found = {change.flags: change.experiment for change in changes(experiment(), planned.memory)}
    assert set(found) == {
        ("--fdl.microbatches=2",),
        ("--fdl.compute.saved=\"('attention',)\"",),
        ("--fdl.mesh.data=1", "--fdl.mesh.fsdp=4"),
        (
            "--fdl.mesh.fsdp=1",
            "--fdl.mesh.tensor=2",
            "--fdl.compute.sequence_parallel=True",
            "--fdl.microbatches=2",
        ),
    }
    for flags, changed in found.items():
        cfg = configs.load("experiments/llama_84m", ["tiny"])
        cfg.mesh.data, cfg.mesh.fsdp = 2, 2
        for flag in flags:  # the shell takes the outer quotes
            apply_override(flag.removeprefix("--fdl.").replace('"', ""), cfg)
        built = fdl.build(cfg)
        if "mesh" in flags[0]:
            assert dict(built.mesh.shape) == dict(changed.mesh.shape)
        assert built.microbatches == changed.microbatches
        assert built.compute.sequence_parallel == changed.compute.sequence_parallel


@pytest.mark.slow
def test_devices_along_the_axis_of_experts_share_batch_and_weights_too(planned):
    advised = {}
    for data, expert in ((1, 4), (2, 2)):
        mesh = make_mesh(data=data, expert=expert)
        found = changes(experiment(mesh=mesh), planned.memory)
        flags = [change.flags[:2] for change in found]
        advised[data] = [each for each in flags if "microbatches" not in each[0]]
    kept = ("--fdl.compute.saved=\"('attention',)\"",)
    assert advised == {
        1: [kept, ("--fdl.mesh.expert=2", "--fdl.mesh.tensor=2")],
        2: [
            kept,
            ("--fdl.mesh.data=1", "--fdl.mesh.fsdp=2"),
            ("--fdl.mesh.data=1", "--fdl.mesh.tensor=2"),
        ],
    }


@pytest.mark.slow
@needs_tpu_compiler
def test_weights_are_not_split_over_slices(planned):
    """Gradients alone cross the network between them."""
    _, devices = absent("2xv5e:2x2")
    advised = {}
    for data in (2, 4):
        mesh = make_mesh(data=data, fsdp=-1, devices=devices)
        found = changes(experiment(mesh=mesh), planned.memory)
        advised[data] = [f for each in found for f in each.flags if "mesh.data" in f]
    assert advised == {2: [], 4: ["--fdl.mesh.data=2"]}


@pytest.mark.slow
def test_a_change_that_does_not_fit_the_model_is_left_out(planned):
    three_heads = functools.partial(llama, vocab=64, embed=32, layers=2, heads=1, mlp=128)
    flags = [each.flags for each in changes(experiment(model=three_heads), planned.memory)]
    assert flags and not any("--fdl.mesh.tensor=2" in each for each in flags)


@pytest.mark.slow
def test_only_what_was_found_to_need_less_is_advised(planned):
    def with_need(needed):
        return dataclasses.replace(planned, memory=dataclasses.replace(planned.memory, step=needed))

    before, less, more = map(with_need, (2_000_000, 900_000, 2_500_000))
    text = str(Advice(before, (Tried(("--fdl.less=1",), less), Tried(("--fdl.more=1",), more))))
    rows = [line.split() for line in text.splitlines()]
    assert rows[2][:5] == ["900", "KB", "1.10", "MB", "yes"] and rows[2][-1] == "--fdl.less=1"
    assert text.endswith("of no help: --fdl.more=1, which needs 2.50 MB")
    assert "nothing that was tried" in str(Advice(before, (Tried(("--fdl.more=1",), more),)))


@pytest.mark.slow
def test_what_is_advised_needs_what_it_says(planned):
    told = []
    found = advise(experiment(), TARGET, planned, told.append)
    assert found.helps and len(found.tried) <= 4
    needs = [each.report.memory.needed for each in found.tried]
    assert needs == sorted(needs)
    for each in found.helps:
        assert each.report.memory.needed < planned.memory.needed
        assert f"trying {' '.join(each.flags)}" in told
