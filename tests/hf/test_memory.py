"""The memory that a host needs beside the weights themselves, for a folder of 1.6 GB."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from lmlib.hf.families import family_of
from lmlib.hf.names import placed
from lmlib.hf.tensor_files import begin_files, laid_out
from lmlib.models.families.llama import llama

ROOT = Path(__file__).parents[2]
GB = 1_000_000_000

# The devices are CPUs, so the weights are in the host's memory. The process prints the peak above
# the memory before, without the loaded weights.
PROCESS = """
import functools, json, sys
import jax
from lmlib import hf, make_mesh
from lmlib.adapters.lora import lora
from lmlib.hf.families import described
from lmlib.recipe import Recipe
from lmlib.optim.trainable import adapters
from pathlib import Path
from runner.weights.models import read_weights
from runner.weights.target import LoadTarget

part, source, target, golden = sys.argv[1:]

def memory(field):
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(field))
    return int(line.split()[1]) * 1024

def peak_of(act):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is counted from here
    before = memory("VmRSS")
    result = act()
    return result, memory("VmHWM") - before

mesh = make_mesh(fsdp=2)

def loading_and_saving():
    hf.load(golden, mesh)  # what is imported and compiled
    model, loading = peak_of(lambda: jax.block_until_ready(hf.load(source, mesh)))
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    _, saving = peak_of(lambda: hf.save(model, target))
    return weights, loading - weights, saving

def base_in(dtype, folder):
    build = functools.partial(lora, described(Path(folder)).build)
    recipe = Recipe(build, 0, adapters(), dtype)
    return jax.block_until_ready(read_weights(str(folder), LoadTarget(recipe, mesh))[0])

def reading(dtype):
    base_in(dtype, golden)
    adapted, peak = peak_of(lambda: base_in(dtype, source))
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(adapted))
    return kept, peak - kept

print(json.dumps(loading_and_saving() if part == "whole" else reading(part)))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of zeros that take no room on the disk."""
    model = jax.eval_shape(
        lambda: llama(
            vocab=8_192, embed=2_048, layers=7, heads=16, mlp=5_632, key=jax.random.key(0)
        )
    )
    family, content = family_of(model)
    folder = tmp_path_factory.mktemp("zeros")
    (folder / "config.json").write_text(json.dumps(content))
    tensors = {each.name: each.shape for each in placed(model, family.names)}
    begin_files(laid_out(folder, {n: (np.dtype("f4"), s) for n, s in tensors.items()}, GB))
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    largest = 4 * max(int(np.prod(shape)) for shape in tensors.values())
    assert size > 1.5 * GB > 10 * largest
    return folder, largest


def measured(part, folder, target):
    """Returns the output of a new process that reads `folder`."""
    ended = subprocess.run(
        [sys.executable, "-c", PROCESS, part, folder, target, ROOT / "tests/hf/golden/llama"],
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2 "
            "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=1",
        },
        capture_output=True,
        text=True,
    )
    shutil.rmtree(target, ignore_errors=True)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.slow
def test_memory_beside_the_weights_does_not_grow_with_them(folder, tmp_path):
    source, largest = folder
    weights, loading, saving = measured("whole", source, tmp_path / "out")
    assert weights > 1.5 * GB
    assert loading < largest + GB / 2
    assert saving < largest + GB / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "bytes_of_a_weight"),
    [("bfloat16", 2), ("int8", 1), ("nf4", 4.127 / 8), ("mxfp4", 4.25 / 8)],
)
def test_a_frozen_base_is_converted_tensor_by_tensor(folder, tmp_path, dtype, bytes_of_a_weight):
    source, largest = folder
    kept, reading = measured(dtype, source, tmp_path / "out")
    table, layer = 8_192 * 2_048, 4 * 2_048**2 + 3 * 2_048 * 5_632
    base = 2 * 2 * table + 7 * layer * bytes_of_a_weight  # tables of the vocabulary in bfloat16
    assert base < kept < base + 0.1 * GB  # and adapters in float32
    assert reading < largest + GB / 2
