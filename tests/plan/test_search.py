"""Searches over settings and meshes, on simulated devices with a memory made up for the test."""

import dataclasses
import functools
import itertools

import fiddle as fdl
import pytest
from aot import absent, needs_tpu_compiler

from lmlib.adapters.lora import lora
from lmlib.compute import Compute
from lmlib.data.synthetic import Synthetic
from lmlib.experiment import Experiment
from lmlib.hardware.specifications import CPU
from lmlib.inspect.saved_activations import SavedActivations
from lmlib.models.families.experts.mixtral import mixtral
from lmlib.models.families.llama import llama
from lmlib.optim.adamw import adamw
from lmlib.optim.trainable import adapters
from lmlib.parallel.mesh import make_mesh
from lmlib.parallel.other_meshes import divisions
from lmlib.plan.planner import plan
from lmlib.plan.search import (
    Trial,
    Trials,
    advise,
    changes,
    keeping,
    microbatch_counts,
    policies,
    search,
    search_meshes,
)
from lmlib.plan.targets import Target, parse
from runner.config import configs
from runner.config.overrides import apply_override

EMBED, LENGTH, ROWS = 32, 64, 8
NAMES = {
    *("attention_input", "query", "key", "value", "attention", "attention_residual"),
    *("mlp_input", "mlp_gate", "mlp_up", "mlp_hidden"),
}


def experiment(**settings) -> Experiment:
    made = Experiment(
        model=functools.partial(llama, vocab=64, embed=EMBED, layers=1, heads=2, mlp=128),
        data=Synthetic(64, ROWS, LENGTH),
        optimizer=functools.partial(adamw, peak_lr=1e-3),
        mesh=make_mesh(fsdp=2),
        steps=10,
    )
    return dataclasses.replace(made, **settings)


def with_memory(capacity: int, devices: int = 2) -> Target:
    return Target(dataclasses.replace(CPU, memory_bytes=capacity), (devices,))


def needed(changed: Experiment) -> int:
    return plan(changed, with_memory(1)).memory.needed


def overridden(flags) -> Experiment:
    """The experiment that the runner builds with these flags; a shell takes the outer quotes."""
    cfg = configs.load("experiments/llama_84m", ["tiny"])
    cfg.mesh.data, cfg.mesh.fsdp = 2, 2
    for flag in flags:
        apply_override(flag.removeprefix("--fdl.").replace('"', ""), cfg)
    return fdl.build(cfg)


def test_microbatch_counts_divide_the_rows_of_a_device():
    for axis in ("data", "fsdp", "expert"):
        assert microbatch_counts(experiment(mesh=make_mesh(**{axis: 4}))) == [1, 2]


@pytest.fixture(scope="module")
def all_policies():
    return policies(experiment())


@pytest.mark.slow
def test_names_that_spare_the_fewest_flops_per_byte_go_first(all_policies):
    everything, *_, nothing = all_policies
    assert set(everything) == NAMES and nothing == ()
    for more, less in itertools.pairwise(all_policies):
        assert set(less) < set(more) and len(more) - len(less) == 1
    # Norms and elementwise products: no matmul is needed for them only.
    assert NAMES - set(all_policies[3]) == {"attention_input", "mlp_input", "mlp_hidden"}
    # For each byte a projection spares embed FLOPs, and attention twice the sequence.
    assert LENGTH * 2 > EMBED and all_policies[-2] == ("attention",)


@pytest.mark.slow
def test_the_best_fits_and_nothing_better_does(all_policies):
    # Room for more than the least that the step can need, and less than the most.
    most = needed(keeping(experiment(), all_policies[0]))
    least = needed(keeping(experiment(microbatches=ROWS // 2), ()))
    assert least < most
    capacity = (most + least) // 2
    found = search(experiment(), with_memory(capacity))
    best = found.best
    built = overridden(best.flags)
    count, saved = built.microbatches, built.compute.saved
    assert needed(keeping(experiment(microbatches=count), saved)) <= capacity
    assert saved in all_policies and count in microbatch_counts(experiment())
    number = all_policies.index(saved)
    if number > 0:
        richer = keeping(experiment(microbatches=count), all_policies[number - 1])
        other = Trial((), plan(richer, with_memory(capacity)))
        assert not other.fits or other.recomputed == best.recomputed
    assert all(best.recomputed <= trial.recomputed for trial in found.trials if trial.fits)
    assert any(trial.fits is False for trial in found.trials)
    assert f"best:\n  {' '.join(best.flags)}" in str(found)


@pytest.mark.slow
def test_nothing_fits():
    found = search(experiment(microbatches=ROWS // 2), with_memory(1_000))
    assert found.best is None and not any(trial.fits for trial in found.trials)
    assert "no setting fits: use more devices" in str(found)


def of_experts(devices: int) -> Experiment:
    model = functools.partial(
        mixtral, vocab=64, embed=32, layers=1, heads=2, mlp=32, experts=4, top=2
    )
    return experiment(model=model, mesh=make_mesh(fsdp=devices), data=Synthetic(64, 8, 32))


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
def test_each_mesh_has_its_own_plan():
    target = parse("cpu:8")
    found = search_meshes(of_experts(8), target, ["expert"])
    ((refused, reason),) = found.impossible
    assert refused == ("--fdl.mesh.fsdp=1", "--fdl.mesh.expert=8")
    assert "8" in reason  # there are 4 experts
    by_flags = {trial.flags: trial.report for trial in found.trials}
    assert len(by_flags) == 3
    for expert in (1, 4):
        mesh = make_mesh(fsdp=8 // expert, expert=expert)
        report = plan(dataclasses.replace(of_experts(8), mesh=mesh), target)
        same = by_flags[f"--fdl.mesh.fsdp={8 // expert}", f"--fdl.mesh.expert={expert}"]
        assert same.memory == report.memory and same.collectives == report.collectives


@pytest.mark.parametrize("axis", ["fsdp", "experts"])
def test_unknown_axes_are_refused(axis):
    with pytest.raises(ValueError, match=f"'{axis}' is no axis to try sizes of"):
        search_meshes(of_experts(8), parse("cpu:8"), [axis])


CHANGED = Compute(saved=("mlp_gate", "attention"))
WITHOUT_GATE = "--fdl.compute.saved=\"('attention',)\""


def on_four(**settings) -> Experiment:
    model = functools.partial(llama, vocab=64, embed=32, layers=2, heads=2, mlp=128)
    mesh = make_mesh(data=2, fsdp=2)
    return experiment(**{"model": model, "mesh": mesh, "compute": CHANGED} | settings)


@pytest.fixture(scope="module")
def planned():
    return plan(on_four(), with_memory(1_000_000, devices=4))


@pytest.mark.slow
def test_changes_and_their_flags_agree(planned):
    found = dict(changes(on_four(), planned.memory))
    assert set(found) == {
        ("--fdl.microbatches=2",),
        (WITHOUT_GATE,),
        ("--fdl.mesh.data=1", "--fdl.mesh.fsdp=4"),
        (
            "--fdl.mesh.fsdp=1",
            "--fdl.mesh.tensor=2",
            "--fdl.compute.sequence_parallel=True",
            "--fdl.microbatches=2",
        ),
    }
    for flags, changed in found.items():
        built = overridden(flags)
        if "mesh" in flags[0]:
            assert dict(built.mesh.shape) == dict(changed.mesh.shape)
        assert built.microbatches == changed.microbatches
        assert built.compute.sequence_parallel == changed.compute.sequence_parallel
    one_head = functools.partial(llama, vocab=64, embed=32, layers=2, heads=1, mlp=128)
    assert not any(
        "--fdl.mesh.tensor=2" in flags
        for flags, _ in changes(on_four(model=one_head), planned.memory)
    )


@pytest.mark.slow
def test_the_activation_that_is_largest_over_all_layers_is_the_first_to_go(planned):
    """`attention` of two unrolled layers is larger than `mlp_gate` of one."""
    one = next(each for each in planned.memory.saved if each.name == "mlp_gate")
    smaller = dataclasses.replace(one, name="attention", bytes_per_device=one.bytes_per_device - 1)
    memory = dataclasses.replace(planned.memory, saved=SavedActivations((smaller, smaller, one)))
    assert ("--fdl.compute.saved=\"('mlp_gate',)\"",) in dict(changes(on_four(), memory))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(None, ["int8"]), ("int8", ["nf4"]), ("nf4", []), ("mxfp4", [])],
)
def test_frozen_weights_get_fewer_bits_only(planned, dtype, expected):
    model = functools.partial(lora, on_four().model)
    adapted = on_four(model=model, trainable=adapters(), frozen_dtype=dtype)
    flags = [flag for each, _ in changes(adapted, planned.memory) for flag in each]
    found = [flag for flag in flags if "frozen_dtype" in flag]
    assert found == [f"--fdl.frozen_dtype={kind}" for kind in expected]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"data": 1, "expert": 4}, [("--fdl.mesh.expert=2", "--fdl.mesh.tensor=2")]),
        (
            {"data": 2, "expert": 2},
            [
                ("--fdl.mesh.data=1", "--fdl.mesh.fsdp=2"),
                ("--fdl.mesh.data=1", "--fdl.mesh.tensor=2"),
            ],
        ),
    ],
)
def test_devices_along_the_axis_of_experts_share_batch_and_weights_too(planned, sizes, expected):
    found = changes(on_four(mesh=make_mesh(**sizes)), planned.memory)
    assert [flags[:2] for flags, _ in found if "mesh" in flags[0]] == expected


@pytest.mark.slow
@needs_tpu_compiler
@pytest.mark.parametrize(("data", "expected"), [(2, []), (4, ["--fdl.mesh.data=2"])])
def test_weights_are_not_split_over_slices(planned, data, expected):
    """Only gradients cross the network between slices."""
    _, devices = absent("2xv5e:2x2")
    mesh = make_mesh(data=data, fsdp=-1, devices=devices)
    found = changes(on_four(mesh=mesh), planned.memory)
    assert [flag for flags, _ in found for flag in flags if "mesh.data" in flag] == expected


@pytest.mark.slow
def test_settings_that_fit_come_first_and_the_others_by_memory(planned):
    def needing(size, flag):
        memory = dataclasses.replace(planned.memory, step=size)
        return Trial((flag,), dataclasses.replace(planned, memory=memory))

    trials = [needing(2_500_000, "--a=1"), needing(900_000, "--b=1"), needing(2_000_000, "--c=1")]
    ordered = Trials(trials)
    rows = [line.split() for line in str(ordered).splitlines()]
    assert [row[-1] for row in rows[1:4]] == ["--b=1", "--c=1", "--a=1"]
    assert rows[1][:3] == ["900", "KB", "yes"] and ordered.best.flags == ("--b=1",)


@pytest.mark.slow
def test_advice_is_compiled(planned):
    told = []
    found = advise(on_four(), with_memory(1_000_000, devices=4), planned, told.append)
    assert min(trial.report.memory.needed for trial in found.trials) < planned.memory.needed
    for trial in found.trials:
        assert not trial.flags or f"trying {' '.join(trial.flags)}" in told
    assert [trial.report for trial in found.trials if not trial.flags] == [planned]
