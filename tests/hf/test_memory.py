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

source, target, golden = sys.argv[1:]

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
hf.load(golden, mesh)  # what is imported and compiled
model, loading = peak_of(lambda: jax.block_until_ready(hf.load(source, mesh)))
weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
_, saving = peak_of(lambda: hf.save(model, target))
del model

def base_in(dtype, folder):
    build = functools.partial(lora, described(Path(folder)).build)
    recipe = Recipe(build, 0, adapters(), dtype)
    return jax.block_until_ready(read_weights(str(folder), LoadTarget(recipe, mesh))[0])

def reading(dtype):
    base_in(dtype, golden)
    adapted, peak = peak_of(lambda: base_in(dtype, source))
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(adapted))
    return kept, peak - kept

print(json.dumps([weights, loading - weights, saving, *reading("bfloat16"), *reading("int8")]))
"""


@pytest.mark.slow
def test_memory_beside_the_weights_does_not_grow_with_them(tmp_path):
    model = jax.eval_shape(
        lambda: llama(
            vocab=8_192, embed=2_048, layers=7, heads=16, mlp=5_632, key=jax.random.key(0)
        )
    )
    family, content = family_of(model)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    tensors = {each.name: each.shape for each in placed(model, family.names)}
    # The bytes are zeros that take no room on the disk.
    begin_files(laid_out(folder, {n: (np.dtype("f4"), s) for n, s in tensors.items()}, GB))
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    largest = 4 * max(int(np.prod(shape)) for shape in tensors.values())
    assert size > 1.5 * GB > 10 * largest
    ended = subprocess.run(
        [sys.executable, "-c", PROCESS, folder, tmp_path / "out", ROOT / "tests/hf/golden/llama"],
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2 "
            "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=1",
        },
        capture_output=True,
        text=True,
    )
    shutil.rmtree(tmp_path)
    assert ended.returncode == 0, ended.stderr
    weights, loading, saving, kept, reading, kept_8, reading_8 = json.loads(
        ended.stdout.splitlines()[-1]
    )
    assert weights > 1.5 * GB
    assert loading < largest + GB / 2
    assert saving < largest + GB / 2
    assert 0.5 * weights < kept < 0.55 * weights  # bfloat16, and adapters in float32
    assert reading < largest + GB / 2
    assert 0.25 * weights < kept_8 < 0.35 * weights  # the vocabulary's tables are in bfloat16
    assert reading_8 < largest + GB / 2
