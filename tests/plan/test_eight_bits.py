"""Rounding to 8 bits costs little traffic on GPUs, by the compiled step."""

import functools

import pytest
from aot import absent

from lmlib.compute import Compute
from lmlib.data.synthetic import Synthetic
from lmlib.experiment import Experiment
from lmlib.models.families.llama import llama
from lmlib.optim.adamw import adamw
from lmlib.parallel.mesh import make_mesh
from lmlib.plan.program import read_program
from lmlib.plan.traffic import kernels

# Layers of experiments/llama_1b, and its tokens in a step.
SIZES = {"vocab": 32_000, "embed": 2_048, "layers": 2, "heads": 16, "mlp": 16_384}
BATCH = {"batch": 32, "seq": 2_048}


def other_bytes(quantized, target):
    """Bytes that kernels without a product read and write on one device, and the step's text."""
    _, devices = absent(target)
    run = Experiment(
        model=functools.partial(llama, **SIZES),
        compute=Compute(quantized=quantized),
        data=Synthetic(SIZES["vocab"], *BATCH.values()),
        optimizer=functools.partial(adamw, peak_lr=1e-3),
        mesh=make_mesh(devices=devices),
        steps=10,
    )
    run.check()
    text = run.trace_step().lower().compile().as_text()
    found = kernels(read_program(text))
    return found.bytes - found.product_bytes, text


@pytest.mark.slow
def test_float8_moves_little_more_than_bfloat16_outside_products():
    rounded, _ = other_bytes({"mlp": "float8", "projections": "float8"}, "h200:1x1")
    assert rounded <= 1.2 * other_bytes(None, "h200:1x1")[0]


@pytest.mark.slow
def test_cudnn_multiplies_mxfp8_on_a_b200():
    rounded, text = other_bytes({"mlp": "mxfp8", "projections": "mxfp8"}, "b200:1x1")
    # Each of seven matrices in the forward product, its recomputation and two gradients.
    assert text.count('custom_call_target="__cudnn$blockScaledDot"') >= 3 * 7
    assert rounded <= 1.7 * other_bytes(None, "b200:1x1")[0]
