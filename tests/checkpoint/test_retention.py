"""The checkpoints that stay, and readers while a run removes the others."""

import math

import jax
import jax.numpy as jnp
import pytest
from forked_processes import run_forked

from lmlib.checkpoint import Checkpoints
from lmlib.checkpoint.manifest import MANIFEST

STATE = {"weight": jnp.ones(4)}


def save_all(directory, metrics: dict[int, float | None], **keeping) -> list[int]:
    with Checkpoints(directory, **keeping) as checkpoints:
        for step, metric in metrics.items():
            assert checkpoints.save(step, STATE, {}) > 0
            if metric is not None:
                checkpoints.rank(step, metric)
        checkpoints.wait()
        return checkpoints.steps()


def test_the_newest_and_every_nth_step_stay(tmp_path):
    steps = dict.fromkeys(range(10, 80, 10))
    assert save_all(tmp_path, steps, keep=2, keep_every=30) == [30, 60, 70]


def test_the_best_stay_also_over_a_restart(tmp_path):
    assert save_all(tmp_path, {1: 3.0, 2: 1.0, 3: 2.0, 4: 4.0}, keep=1, keep_best=2) == [2, 3, 4]
    assert save_all(tmp_path, {5: 1.5, 6: 9.0}, keep=1, keep_best=2) == [2, 5, 6]


def test_ties_go_to_the_newer(tmp_path):
    assert save_all(tmp_path, {1: 1.0, 2: 1.0, 3: 2.0}, keep=1, keep_best=1) == [2, 3]


def test_a_held_step_stays_until_it_is_released(tmp_path):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step, hold in ((1, None), (2, 1), (3, 1), (4, 1)):
            checkpoints.save(step, STATE, {}, hold=hold)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(5, STATE, {}, hold=1)
        checkpoints.wait()
        assert checkpoints.steps() == [1, 5]
        checkpoints.save(6, STATE, {})
        checkpoints.wait()
        assert checkpoints.steps() == [6]


def test_a_ranked_checkpoint_is_sound_and_an_unsaved_one_is_ignored(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, STATE, {})
        checkpoints.rank(1, 2.5)
        checkpoints.rank(2, 1.5)
        assert checkpoints.verify(1).metric == 2.5
        assert [entry.name for entry in tmp_path.iterdir()] == ["1"]


@pytest.mark.parametrize("none", [None, math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_is_never_best(tmp_path, none):
    assert save_all(tmp_path, {1: 5.0, 2: none, 3: none, 4: None}, keep=1, keep_best=1) == [1, 4]


def test_a_best_step_without_a_manifest_does_not_stop_a_run(tmp_path):
    save_all(tmp_path, {1: 1.0, 2: 2.0}, keep=1, keep_best=1)
    (tmp_path / "1" / MANIFEST).unlink()
    assert save_all(tmp_path, {3: 3.0}, keep=1, keep_best=1) == [2, 3]


@pytest.mark.parametrize(
    "keeping", [{"keep": 0}, {"keep": 1, "keep_every": 0}, {"keep": 1, "keep_best": -1}]
)
def test_numbers_that_keep_nothing_are_refused(tmp_path, keeping):
    name, value = list(keeping.items())[-1]
    with pytest.raises(ValueError, match=f"{name}={value}"):
        Checkpoints(tmp_path / "new", **keeping)
    assert not (tmp_path / "new").exists()


def test_notes_are_copied_and_must_be_json(tmp_path):
    notes = {"data": {"position": 1}}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, STATE, notes)
        notes["data"]["position"] = 2  # while it is saved
        checkpoints.wait()
        sharding = STATE["weight"].sharding
        target = {"weight": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding)}
        assert checkpoints.restore(1, target)[1] == {"data": {"position": 1}}
        with pytest.raises(ValueError, match=r"the notes cannot be saved as JSON: .*object is not"):
            checkpoints.save(2, STATE, {"data": object()})


# A run that keeps one checkpoint, and a reader of the same folder, in one process. `during` has
# something done just before Python does `event` to a path in which `pattern` is found, once.
BESIDE_EACH_OTHER = """
import errno, os, re, shutil, sys
import jax, jax.numpy as jnp
from lmlib.checkpoint import Checkpoints, DamagedCheckpointError, RemovedCheckpointError

directory = sys.argv[1]
run = Checkpoints(directory, keep=1)
reader = Checkpoints(directory, read_only=True)
state = {"weight": jnp.ones(64), "scale": jnp.ones(3)}
target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
waiting = []

def during(event, pattern, do):
    waiting.append((event, pattern, do))

def audit(name, arguments):
    for each in list(waiting):
        event, pattern, do = each
        path = arguments[0] if name == event else None
        if isinstance(path, (str, bytes, os.PathLike)) and re.search(pattern, os.fsdecode(path)):
            waiting.remove(each)
            do()

def save(step):
    run.save(step, state, {"tokens": step})
    run.wait()

def told(read, step):
    try:
        read(step)
    except (DamagedCheckpointError, RemovedCheckpointError) as error:
        print(type(error).__name__, error)
    else:
        print("sound")

sys.addaudithook(audit)
save(1)
"""


def lines(code: str, directory) -> list[str]:
    ended = run_forked("-c", BESIDE_EACH_OTHER + code, directory)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_a_checkpoint_that_is_removed_while_it_is_read_is_not_called_damaged(tmp_path):
    reads = """
restore = lambda step: reader.restore(step, target)
part = lambda step: reader.restore_part(step, "weight", {"": target["weight"]})
during("open", "/1/state/weight/0$", lambda: save(2))
told(reader.verify, 1)
during("os.scandir", "/2/state$", lambda: save(3))
told(reader.verify, 2)
during("open", "/3/manifest.json$", lambda: save(4))
told(restore, 3)
during("open", "/4/notes/notes.json$", lambda: save(5))
told(restore, 4)
told(restore, 5)
"""
    found = lines(reads, tmp_path)
    assert found[:-1] == [
        f"RemovedCheckpointError the checkpoint {tmp_path}/{step} was removed meanwhile: a run "
        "removes old checkpoints when it saves new ones"
        for step in (1, 2, 3, 4)
    ]
    assert found[-1] == "sound"


def test_a_missing_file_in_an_existing_folder_is_damage(tmp_path):
    reads = """
zarray = "/1/state/scale/.zarray"
remove = lambda: os.remove(directory + zarray)
during("open", zarray, lambda: during("open", zarray, remove))  # it is read twice
told(lambda step: reader.restore(step, target), 1)
during("os.scandir", "/1/state/weight$", lambda: shutil.rmtree(f"{directory}/1/state/weight"))
told(reader.verify, 1)
"""
    found = lines(reads, tmp_path)
    damaged = f"DamagedCheckpointError the checkpoint {tmp_path}/1 is damaged: state"
    assert found[0].startswith(f"{damaged}/scale/.zarray cannot be read: No such file or directory")
    assert found[1] == f"{damaged}/weight is missing"


def test_no_reader_sees_half_of_a_checkpoint(tmp_path):
    reads = """
seen = lambda: print(reader.steps(), *sorted(os.listdir(directory)))
during("shutil.rmtree", "/1[./]", seen)
during("os.rmdir", "/1[./]", seen)
save(2)
seen()
"""
    half = "[2] 1.orbax-checkpoint-tmp-removed 2"
    assert lines(reads, tmp_path) == [half, half, "[2] 2"]


def test_files_that_nfs_keeps_for_a_reader_are_removed_later(tmp_path):
    """There a deleted file that somebody has open stays in its folder, which cannot be deleted."""
    reads = """
def held():
    raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

during("os.rmdir", "weight$", held)
save(2)
save(3)
print(*sorted(os.listdir(directory)))
run.close()
Checkpoints(directory, read_only=True)
print(*sorted(os.listdir(directory)))
Checkpoints(directory).close()
print(*sorted(os.listdir(directory)))
"""
    half = "1.orbax-checkpoint-tmp-removed 3"
    assert lines(reads, tmp_path) == [half, half, "3"]


def test_a_directory_in_place_of_the_runs_own_loses_nothing(tmp_path):
    """Just before the new checkpoint gets its name, where the older one is about to be removed."""
    reads = """
def swap():
    os.rename(directory, f"{directory}_moved")
    os.makedirs(f"{directory}/1/of_another_run")

during("os.rename", r"/2\\.orbax-checkpoint-tmp-[0-9a-f]{8}$", swap)
save(2)
print(*sorted(os.listdir(f"{directory}/1")), *sorted(os.listdir(f"{directory}_moved")))
"""
    assert lines(reads, tmp_path / "run") == ["of_another_run 2"]
