"""Plans of runs that train a part: what frozen weights take, and what is computed of them."""

import fiddle as fdl
import pytest
from aot import needs_gpu_compiler

from lmlib.plan.planner import plan
from lmlib.plan.targets import parse, prepare
from runner.aot.abstract_inputs import built, without_data
from runner.config import configs


def made_once(report):
    """FLOPs for a token, without those that are made again."""
    return report.flops.counted.of("forward", "backward") / report.flops.tokens


@needs_gpu_compiler
@pytest.mark.slow
def test_405b_trains_on_eight_devices_of_192_gb():
    """Without a copy of the base, of its stacks, or of its gradients."""
    target = parse("b200:8")
    prepare(target)
    cfg = without_data(configs.load("experiments/llama_405b_lora"))
    report = plan(built(cfg, target.devices()), target)
    base = 405_853_388_800  # Llama 3.1 405B's
    assert report.memory.frozen == 2 * base // 8
    assert report.memory.parameters == 4 * (report.parameters - base) // 8  # adapters
    assert report.memory.needed < 150e9
    assert report.memory.counted.temporaries < report.memory.frozen / 3
    assert made_once(report) == pytest.approx(report.flops.analytic, rel=0.03)


@pytest.mark.slow
def test_of_eight_simulated_devices_each_holds_an_eighth_of_the_base():
    cfg = configs.load("experiments/llama_8b_lora", ["tiny"], ["mesh.fsdp=8", "model.of.layers=1"])
    target = parse("cpu:8")
    report = plan(fdl.build(without_data(cfg)), target)
    vocab, embed, mlp, heads, kv_heads = 512, 64, 128, 4 * 16, 2 * 16
    shapes = 2 * [(embed, heads)] + 2 * [(embed, kv_heads)] + 3 * [(embed, mlp)]
    matrices = sum(one * other for one, other in shapes)
    base = 2 * vocab * embed + matrices + 3 * embed
    assert report.memory.frozen == 2 * base // 8
    assert report.memory.gradients == report.memory.parameters
    low_rank = cfg.model.rank * sum(one + other for one, other in shapes)
    assert report.memory.parameters == 4 * low_rank // 8
    attention = 12 * heads * 64  # keys
    expected = 4 * (matrices + vocab * embed) + 6 * low_rank + attention
    assert report.flops.analytic == expected
    # Nothing is trained below the only layer, so no gradient of its normed input is made:
    of_input = 2 * (embed * (heads + 2 * kv_heads) + 3 * embed * cfg.model.rank)
    scores_again = 2 * heads * 64
    assert made_once(report) == pytest.approx(expected - of_input + scores_again, rel=0.003)
