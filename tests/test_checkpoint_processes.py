"""Two processes that save into one directory, and what each of them sees of damage."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from lmlib.checkpoint import Checkpoints

ROOT = Path(__file__).parents[1]

PROCESS = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

directory, port, index = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.distributed.initialize(f"localhost:{port}", 2, index)
from lmlib.checkpoint import Checkpoints

mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Explicit,))
split = NamedSharding(mesh, P("fsdp"))
rows = np.arange(16, dtype=np.float32)[8 * index:8 * index + 8]
state = {"weight": jax.make_array_from_process_local_data(split, rows)}
target = {"weight": jax.ShapeDtypeStruct((16,), jnp.float32, sharding=split)}
with Checkpoints(directory) as checkpoints:
    checkpoints.save(1, state, {"tokens": 1})
    checkpoints.save(2, jax.tree.map(lambda x: 2 * x, state), {"tokens": 2})
    checkpoints.save(3, jax.tree.map(lambda x: 3 * x, state), {"tokens": 3})
    checkpoints.wait()
    if index == 1:
        with open(f"{directory}/3/state/weight/1", "r+b") as file:
            file.write(b"wrong")
    multihost_utils.sync_global_devices("damaged")
    found = checkpoints.restore_newest(target)
    rows_of_2 = [shard.data for shard in found.state["weight"].addressable_shards]
    assert np.array_equal(np.concatenate(rows_of_2), 2 * rows), rows_of_2
    print(found.step, [error.folder.name for error in found.damaged], checkpoints.steps())
"""


def test_two_processes_save_one_checkpoint_and_fall_back_together(tmp_path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    directory = tmp_path / "checkpoints"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(directory), str(port), str(index)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    for child in children:
        output, errors = child.communicate(timeout=120)
        assert child.returncode == 0, errors
        assert output.split("\n")[-2] == "2 ['3'] [1, 2]", output + errors
    with Checkpoints(directory) as checkpoints:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        wanted = jax.ShapeDtypeStruct((16,), jnp.float32, sharding=sharding)
        found = checkpoints.restore_newest({"weight": wanted})
    assert found.step == 2
    np.testing.assert_array_equal(found.state["weight"], 2 * np.arange(16.0))
