"""Two processes save into one directory, and each of them reads it and notices damage."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from two_processes import run_two

from lmlib.checkpoint import Checkpoints

PROCESS = """
import pathlib, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

directory, address, index = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.distributed.initialize(address, 2, index)
from lmlib.checkpoint import Checkpoints, RemovedCheckpointError
from lmlib.checkpoint.folders import remove

def remove_the_first(event, arguments):
    if event == "open" and str(arguments[0]) == f"{directory}/1/state/weight/2":
        remove([pathlib.Path(directory, "1")])

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
    print(found.step, [error.folder.name for error in found.damaged], checkpoints.steps(), end=" ")
    sys.addaudithook(remove_the_first)  # which process 1 alone reads so
    try:
        checkpoints.restore(1, target)
    except RemovedCheckpointError as error:
        print(error.folder.name, "is removed")
"""


# Tells which chunks each process opens in a save and in a restore.
READS = """
import json, re, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

directory, address, index = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.distributed.initialize(address, 2, index)
from lmlib.checkpoint import Checkpoints

opened = []

def hear(event, arguments):
    if event != "open" or arguments[1] is None:  # `os.open`, which has no mode, is there to sync
        return
    if found := re.search(r"/state[^/]*/(\\w+/[0-9.]+)$", str(arguments[0])):
        opened.append(found[1])

mesh = jax.make_mesh((2, 2), ("fsdp", "data"), axis_types=(AxisType.Explicit,) * 2)
layouts = {"split": P("fsdp"), "other": P("data"), "whole": P(), "odd": P()}
shapes = {"split": (4, 6), "other": (4, 6), "whole": (8, 6), "odd": (3, 5)}
target = {
    name: jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, layouts[name]))
    for name, shape in shapes.items()
}
full = {name: np.random.default_rng(0).normal(size=shape) for name, shape in shapes.items()}
state = {
    name: jax.make_array_from_callback(
        leaf.shape, leaf.sharding, lambda i, name=name: full[name][i].astype("float32")
    )
    for name, leaf in target.items()
}
sys.addaudithook(hear)
with Checkpoints(directory) as checkpoints:
    checkpoints.save(1, state, {})
    checkpoints.wait()
    in_save = list(opened)
    opened.clear()
    restored, _ = checkpoints.restore(1, target)
for name, array in restored.items():
    for shard in array.addressable_shards:
        assert np.array_equal(shard.data, full[name][shard.index].astype("float32")), name
print(json.dumps([in_save, opened]))
"""


@pytest.mark.landing
def test_each_process_digests_what_it_wrote_and_restores_from_one_reading(tmp_path):
    directory = tmp_path / "checkpoints"
    (saved_0, restored_0), (saved_1, restored_1) = map(json.loads, run_two(READS, directory))
    chunks = sorted(
        str(file.relative_to(directory / "1/state"))
        for file in (directory / "1/state").rglob("*")
        if file.name[0].isdigit()
    )
    assert sorted(saved_0 + saved_1) == chunks  # each by one process, once
    for read_0, read_1 in ((saved_0, saved_1), (restored_0, restored_1)):
        # Two devices hold each half of `split`, and Orbax lets both write.
        assert sorted(file for file in read_0 if "split" in file) == ["split/0.0", "split/1.0"]
        assert sorted(file for file in read_1 if "split" in file) == ["split/2.0", "split/3.0"]
        assert len(read_0) == len(set(read_0))  # nothing twice
        assert len(read_1) == len(set(read_1))
    assert {"other/0.0", "other/2.0"} <= set(saved_0)
    assert {"other/1.0", "other/3.0"} <= set(saved_1)
    assert sorted({*restored_0, *restored_1}) == chunks


def test_two_processes_save_one_checkpoint_fall_back_and_miss_one_together(tmp_path):
    directory = tmp_path / "checkpoints"
    assert run_two(PROCESS, directory) == ["2 ['3'] [1, 2] 1 is removed"] * 2
    with Checkpoints(directory) as checkpoints:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        wanted = jax.ShapeDtypeStruct((16,), jnp.float32, sharding=sharding)
        found = checkpoints.restore_newest({"weight": wanted})
    assert found.step == 2
    np.testing.assert_array_equal(found.state["weight"], 2 * np.arange(16.0))
