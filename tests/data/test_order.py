"""The order is the law: processes, meshes, microbatches and resumes never change a global batch.

Real processes share eight devices and write down what each device holds (this file is also their
program); the tests put the global batches together and compare them with `Source.batch`.
"""

import dataclasses
import itertools
import json
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from started import Started, free_address

from lmlib.data.batch import Batch
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.mixture import Mixture, Stage
from lmlib.data.prefetch import Prefetch
from lmlib.data.synthetic import Synthetic
from lmlib.parallel.layout import partition
from lmlib.parallel.mesh import make_mesh

slow = pytest.mark.slow

BATCH_SIZE, SEQUENCE_LENGTH = 32, 12
DEVICES = 8
MESHES = [(8, 1, 1), (2, 4, 1), (2, 2, 2), (1, 1, 8)]  # data, fsdp, tensor
STARTS = [0, 3, 130]  # where runs begin or resume; each makes two steps


def sources(data_set):
    """Those under test. `data_set` has fewer than 64 sequences: most steps are past an epoch."""

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


class Recording:
    """A source that remembers which rows were read of each step."""

    def __init__(self, source):
        self._source = source
        self.batch_size, self.sequence_length = source.batch_size, source.sequence_length
        self.max_token_id, self.tokenizer = source.max_token_id, source.tokenizer
        self.batches, self.bytes_per_target = source.batches, source.bytes_per_target
        self.rows_read: dict[int, list[int]] = {}

    def batch(self, step, rows=slice(None)):
        self.rows_read.setdefault(step, []).extend(range(self.batch_size)[rows])
        return self._source.batch(step, rows)


def case(source, mesh, step):
    return f"{source}, mesh {mesh}, step {step}"


def work(address, processes, process, data_set, out):
    """One process: writes the rows it read and each of its shards with its place, case by case."""
    jax.distributed.initialize(address, processes, process)
    assert (jax.device_count(), jax.local_device_count()) == (DEVICES, DEVICES // processes)
    held: dict[str, np.ndarray] = {}
    for (name, source), sizes in itertools.product(sources(data_set).items(), MESHES):
        devices = jax.devices()
        if sizes[0] == DEVICES:  # so that the rows of a process are not neighbours
            devices = [*devices[::2], *devices[1::2]]
        sharding = NamedSharding(make_mesh(*sizes, devices=devices), partition("batch seq"))
        for start in STARTS:
            recording = Recording(source)
            with Prefetch(recording, sharding, start, start + 2) as batches:
                for step, batch in batches:
                    key = case(name, sizes, step)
                    held[f"{key}/rows"] = np.array(recording.rows_read[step])
                    for field, values in fields_of(batch).items():
                        for number, shard in enumerate(values.addressable_shards):
                            held[f"{key}/{field}/{number}"] = np.asarray(shard.data)
                            spans = zip(shard.index, values.shape, strict=True)
                            held[f"{key}/{field}/{number}/span"] = np.array(
                                [span.indices(size)[:2] for span, size in spans]
                            )
    np.savez(out, **held)


@pytest.fixture(
    scope="module", params=[pytest.param(1, marks=slow), 2, pytest.param(4, marks=slow)]
)
def held_by_processes(request, example, tmp_path_factory):
    """What each of 1, 2 or 4 processes wrote."""
    count = request.param
    out = tmp_path_factory.mktemp(f"processes_{count}")
    devices = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES // count}"}
    run, address = Started([out / f"{n}.log" for n in range(count)]), free_address()
    for n in range(count):
        arguments = json.dumps([address, count, n, str(example), str(out / f"{n}.npz")])
        run.start(n, __file__, arguments, environment=devices)
    assert run.exit_codes() == [0] * count, run.everything()
    return [dict(np.load(out / f"{process}.npz")) for process in range(count)]


def shards(held, prefix):
    """The rows, columns and values of each shard of one array."""
    for number in itertools.count():
        if f"{prefix}/{number}" not in held:
            return
        rows, columns = held[f"{prefix}/{number}/span"][:2]
        yield slice(*rows), slice(*columns), held[f"{prefix}/{number}"]


def cases():
    steps = [step for start in STARTS for step in (start, start + 1)]
    return itertools.product(["stored", "made up", "mixture"], MESHES, steps)


@pytest.mark.slow
def test_the_global_batch_is_the_same_for_any_processes_mesh_and_resume(held_by_processes, example):
    expected = sources(str(example))
    for name, mesh, step in cases():
        for field, whole in fields_of(expected[name].batch(step)).items():
            copies = np.zeros(whole.shape, int)
            for held in held_by_processes:
                for rows, columns, values in shards(held, f"{case(name, mesh, step)}/{field}"):
                    assert values.dtype == whole.dtype
                    np.testing.assert_array_equal(
                        values, whole[rows, columns], err_msg=f"{case(name, mesh, step)}: {field}"
                    )
                    copies[rows, columns] += 1
            assert (copies == mesh[2]).all()  # nothing is missing; `tensor` holds copies


def test_each_process_reads_the_rows_of_its_devices_once(held_by_processes):
    for name, mesh, step in cases():
        key = case(name, mesh, step)
        read = [held[f"{key}/rows"].tolist() for held in held_by_processes]
        for rows_read, held in zip(read, held_by_processes, strict=True):
            spans = [rows for rows, _, _ in shards(held, f"{key}/tokens")]
            mine = {row for rows in spans for row in range(BATCH_SIZE)[rows]}
            assert sorted(rows_read) == sorted(mine), key
        if mesh[0] * mesh[1] >= len(read):  # the mesh gives each process rows of its own
            assert sorted(itertools.chain(*read)) == list(range(BATCH_SIZE)), key
        else:
            assert all(rows_read == list(range(BATCH_SIZE)) for rows_read in read), key


def fields_of(batch):
    """Its arrays, those that are there: a teacher's are not always."""
    arrays = [one.name for one in dataclasses.fields(Batch) if not one.metadata.get("static")]
    return {name: values for name in arrays if (values := getattr(batch, name)) is not None}


if __name__ == "__main__":
    work(*json.loads(sys.argv[1]))
