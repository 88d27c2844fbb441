"""What a step in stages sends, array by array: budgets computed by hand."""

import functools
from collections import Counter

import jax
import pytest
from sent_arrays import BACKWARD, FORWARD, sent

from lmlib.compute import Compute
from lmlib.models.families.llama import llama

pytestmark = pytest.mark.several_devices

V, E, L, H, K, D, F = 512, 64, 8, 4, 2, 16, 96
B, S = 16, 128
STAGE, FSDP = 4, 2
TARGETS = ("cpu:8", "h100:1x8")


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_a_slot_passes_rows_on_and_gathers_its_own_layers_alone(target):
    """With one round a stage has L / STAGE layers, and all microbatches go through them."""
    make = functools.partial(
        llama, vocab=V, embed=E, layers=L, heads=H, kv_heads=K, head_dim=D, mlp=F,
        key=jax.random.key(0),
    )  # fmt: skip
    compute = Compute(dtype="float32", attention="plain", pipeline_rows=1)
    found = sent(make, compute, (B, S), target, stage=STAGE, fsdp=FSDP)
    microbatches = B // FSDP
    slots = microbatches + STAGE - 1
    # Rows to the next stage, and those that wait, or have ended, one stage up.
    rows = 3 * slots
    assert found["slot"] == {
        ("stage",): Counter(
            {("collective-permute", where, S * E): rows for where in (FORWARD, BACKWARD)}
        )
    }
    matrices = [E * H * D, E * K * D, E * K * D, H * D * E, *3 * [E * F]]
    summed = "all-reduce" if target == "cpu:8" else "reduce-scatter"
    weights = Counter()
    for size in (E, E, *matrices):
        for sending in (("all-gather", FORWARD), ("all-gather", BACKWARD), (summed, BACKWARD)):
            weights[*sending, size] += L // STAGE * slots
    assert found["layer"] == {("fsdp",): weights}
