"""Policies and the search over them, on simulated devices with a memory made up for the test."""

import dataclasses
import functools
import itertools

import fiddle as fdl
import pytest

from lmlib.data.synthetic import Synthetic
from lmlib.experiment import Experiment
from lmlib.hardware.specifications import CPU
from lmlib.models.families.llama import llama
from lmlib.optim.adamw import adamw
from lmlib.parallel.mesh import make_mesh
from lmlib.plan.planner import plan
from lmlib.plan.search import keeping, microbatch_counts, policies, search
from lmlib.plan.targets import Target
from runner.config import configs
from runner.config.overrides import apply_override

EMBED, LENGTH, ROWS = 32, 64, 8
NAMES = {
    *("attention_input", "query", "key", "value", "attention", "attention_residual"),
    *("mlp_input", "mlp_gate", "mlp_up", "mlp_hidden"),
}


def experiment() -> Experiment:
    return Experiment(
        model=functools.partial(llama, vocab=64, embed=EMBED, layers=1, heads=2, mlp=128),
        data=Synthetic(64, ROWS, LENGTH),
        optimizer=functools.partial(adamw, peak_lr=1e-3),
        mesh=make_mesh(fsdp=2),
        steps=10,
    )


@pytest.fixture(scope="module")
def all_policies():
    return policies(experiment())


@pytest.mark.slow
def test_policies_go_from_everything_to_nothing(all_policies):
    everything, *_, nothing = all_policies
    assert set(everything.saved) == NAMES
    assert nothing.saved == () and nothing.bytes == 0
    for more, less in itertools.pairwise(all_policies):
        assert set(less.saved) < set(more.saved) and len(more.saved) - len(less.saved) == 1
        assert less.bytes < more.bytes


@pytest.mark.slow
def test_what_costs_nothing_to_compute_again_goes_first(all_policies):
    # Norms and products by element: no matmul leads to them alone.
    gone = NAMES - set(all_policies[3].saved)
    assert gone == {"attention_input", "mlp_input", "mlp_hidden"}


@pytest.mark.slow
def test_what_takes_the_most_flops_for_its_bytes_goes_last(all_policies):
    # For each byte of it a projection saves embed FLOPs, and attention twice the sequence.
    assert LENGTH * 2 > EMBED
    assert all_policies[-2].saved == ("attention",)


@pytest.mark.slow
def test_bytes_are_those_of_the_names(all_policies):
    one_row = LENGTH * EMBED * 2  # bf16
    per_device = ROWS // 2 * one_row
    everything = all_policies[0]
    # Eight arrays of embed (heads × head_dim is embed), three of mlp, four times as wide.
    assert len(everything.saved) == 10
    assert everything.bytes == (7 + 3 * 4) * per_device


def test_each_device_has_as_few_sequences_whatever_axis_they_lie_along():
    for axis in ("data", "fsdp", "expert"):
        split = dataclasses.replace(experiment(), mesh=make_mesh(**{axis: 4}))
        assert microbatch_counts(split) == [1, 2]


def with_memory(capacity: int) -> Target:
    return Target(dataclasses.replace(CPU, memory_bytes=capacity), (2,))


def needed(changed: Experiment) -> int:
    return plan(changed, with_memory(1)).memory.needed


@pytest.fixture(scope="module")
def found(all_policies):
    """With room for more than the least that the step can need, and less than the most."""
    most = needed(keeping(experiment(), all_policies[0].saved))
    least = needed(keeping(dataclasses.replace(experiment(), microbatches=ROWS // 2), ()))
    assert least < most
    capacity = (most + least) // 2
    return capacity, search(experiment(), with_memory(capacity))


@pytest.mark.slow
def test_the_best_fits(found, all_policies):
    capacity, search_ = found
    assert search_.policies == all_policies
    best = search_.best
    assert best.fits
    changed = dataclasses.replace(experiment(), microbatches=best.microbatches)
    assert needed(keeping(changed, best.saved)) <= capacity


@pytest.mark.slow
def test_what_is_better_does_not_fit(found, all_policies):
    capacity, search_ = found
    best = search_.best
    fewer = dataclasses.replace(experiment(), microbatches=best.microbatches)
    number = [policy.saved for policy in all_policies].index(best.saved)
    if best.microbatches > 1:
        larger = dataclasses.replace(fewer, microbatches=best.microbatches // 2)
        assert needed(keeping(larger, ())) > capacity
    if number > 0:
        assert needed(keeping(fewer, all_policies[number - 1].saved)) > capacity
    assert best.microbatches > 1 or number > 0


@pytest.mark.slow
def test_few_steps_are_compiled_and_all_are_shown(found, all_policies):
    _, search_ = found
    assert len(search_.trials) <= 10 < 3 * len(all_policies)
    lines = str(search_).splitlines()
    assert len(search_.trials) == sum(line[:1].isdigit() for line in lines)
    assert sum("yes, best" in line for line in lines) == 1


@pytest.mark.slow
def test_the_flags_are_what_the_runner_takes(found):
    best = found[1].best
    cfg = configs.load("experiments/llama_84m", ["tiny"])
    for flag in best.flags:
        # The shell takes the outer quotes.
        apply_override(flag.removeprefix("--fdl.").replace('"', ""), cfg)
    built: Experiment = fdl.build(cfg)
    assert built.microbatches == best.microbatches
    assert built.compute.saved == best.saved


@pytest.mark.slow
def test_nothing_fits():
    found = search(dataclasses.replace(experiment(), microbatches=ROWS // 2), with_memory(1_000))
    assert found.best is None and found.policies == ()
    assert "nothing fits" in str(found)
