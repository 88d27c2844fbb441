"""The order is the law: processes, meshes, microbatches and resumes never change a global batch.

Real processes share eight devices and compare what each device holds with `Source.batch` (this file
is also their program).
"""

import dataclasses
import itertools
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from numbered_source import remember_rows
from two_processes import run_two

from lmlib.data.batch import Batch
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.mixture import Mixture, Stage
from lmlib.data.prefetch import Prefetch
from lmlib.data.synthetic import Synthetic
from lmlib.parallel.layout import partition
from lmlib.parallel.mesh import make_mesh

BATCH_SIZE, SEQUENCE_LENGTH, DEVICES = 32, 12, 8
MESHES = [(8, 1, 1), (2, 4, 1), (2, 2, 2), (1, 1, 8)]  # data, fsdp, tensor
STARTS = [0, 3, 130]  # where runs begin or resume; each makes two steps


def sources(data_set):
    """By name. `data_set` has fewer than 64 sequences: most steps are past an epoch."""

    def stored(seed):
        return FlatTokens(data_set, "train", BATCH_SIZE, SEQUENCE_LENGTH, seed=seed)

    def made_up(seed, teacher_k=None):
        return Synthetic(300, BATCH_SIZE, SEQUENCE_LENGTH, seed=seed, teacher_k=teacher_k)

    mixture = Mixture(
        {"one": stored(1), "two": stored(2), "three": made_up(3)},
        [
            Stage({"one": 5, "two": 2, "three": 1}),
            Stage({"one": 1, "three": 1}, begin=4),  # inside the second run
        ],
    )
    return {"stored": stored(0), "made up": made_up(0, teacher_k=3), "mixture": mixture}


def arrays_of(batch):
    """Returns its arrays by name. Only some batches have a teacher's arrays."""
    fields = [field.name for field in dataclasses.fields(Batch) if not field.metadata.get("static")]
    return {name: values for name in fields if (values := getattr(batch, name)) is not None}


def check_process(data_set, processes, address, process):
    """Reads all cases in one of the processes, and checks the arrays on its devices."""
    jax.distributed.initialize(address, processes, process)
    assert (jax.device_count(), jax.local_device_count()) == (DEVICES, DEVICES // processes)
    expected = sources(data_set)
    for (name, source), sizes in itertools.product(sources(data_set).items(), MESHES):
        devices = jax.devices()
        if sizes[0] == DEVICES:  # so that the rows of a process are not neighbours
            devices = [*devices[::2], *devices[1::2]]
        sharding = NamedSharding(make_mesh(*sizes, devices=devices), partition("batch seq"))
        apart = sizes[0] * sizes[1] >= processes  # the mesh gives each process rows of its own
        read = remember_rows(source)
        for start in STARTS:
            with Prefetch(source, sharding, start, start + 2) as batches:
                for step, batch in batches:
                    case, mine = f"{name}, mesh {sizes}, step {step}", set()
                    whole = arrays_of(expected[name].batch(step))
                    assert whole.keys() == arrays_of(batch).keys(), case
                    for field, values in arrays_of(batch).items():
                        assert values.dtype == whole[field].dtype
                        for shard in values.addressable_shards:
                            mine.update(range(BATCH_SIZE)[shard.index[0]])
                            np.testing.assert_array_equal(
                                shard.data, whole[field][shard.index], err_msg=f"{case}: {field}"
                            )
                    assert sorted(read.pop(step)) == sorted(mine), case  # each once
                    assert len(mine) == (BATCH_SIZE // processes if apart else BATCH_SIZE), case
    print("the same batches")


@pytest.mark.parametrize(
    "processes",
    [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)],
)
def test_the_global_batch_is_the_same_for_any_processes_mesh_and_resume(example, processes):
    program = Path(__file__).read_text()
    run_two(program, example, processes, count=processes, devices=DEVICES // processes)


if __name__ == "__main__":
    example, count, address, number = sys.argv[1:]
    check_process(example, int(count), address, int(number))
