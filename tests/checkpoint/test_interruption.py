"""Saves that are killed or that the storage fails, in processes of their own."""

import contextlib
import errno
import os
import re
import shutil
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forked_processes import run_forked
from sentinels import sentinels

from lmlib.checkpoint import Checkpoints
from lmlib.checkpoint.failures import named_errors

SIZE = 1 << 16

# Kills itself just before Python does `event` to a path in which `pattern` is found, once step 1
# is whole and step 2 has begun.
SAVE_AND_DIE = f"""
import os, re, signal, sys
import jax.numpy as jnp
from lmlib.checkpoint import Checkpoints

directory, event, pattern = sys.argv[1:]
begun = False

def die(name, arguments):
    if begun and name == event and isinstance(arguments[0], (str, bytes, os.PathLike)):
        if re.search(pattern, os.fsdecode(arguments[0])):
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(die)
checkpoints = Checkpoints(directory, keep=1)
checkpoints.save(1, {{"weight": jnp.full({SIZE}, 1.0)}}, {{"tokens": 1}})
checkpoints.wait()
begun = True
checkpoints.save(2, {{"weight": jnp.full({SIZE}, 2.0)}}, {{"tokens": 2}})
checkpoints.wait()
print("never killed")
"""


def target() -> dict[str, jax.ShapeDtypeStruct]:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {"weight": jax.ShapeDtypeStruct((SIZE,), jnp.float32, sharding=sharding)}


@pytest.mark.parametrize(
    ("event", "pattern", "survivor"),
    sentinels(
        [
            ("os.mkdir", r"/2\.orbax-checkpoint-tmp-\w+$", 1),  # before anything is there
            ("open", r"state\.orbax-checkpoint-tmp/_METADATA$", 1),  # while arrays are written
            # all but the manifest is there; it lacks only its name; the step is not yet visible
            ("open", r"2\.orbax-checkpoint-tmp-\w+/\.manifest\.json\.\w+\.unfinished$", 1),
            ("os.rename", r"2\.orbax-checkpoint-tmp-\w+/\.manifest\.json", 1),
            ("os.rename", r"/2\.orbax-checkpoint-tmp-\w+$", 1),
            ("os.rename", "/1$", 2),  # both whole, the older about to be removed
            ("os.rmdir", r"/1\.orbax-checkpoint-tmp-removed$", 2),  # its name gone, half deleted
        ],
        lambda moment: moment[0] in ("os.rename", "os.rmdir"),
    ),
)
def test_the_last_complete_checkpoint_restores_after_a_kill(tmp_path, event, pattern, survivor):
    child = run_forked("-c", SAVE_AND_DIE, tmp_path, event, pattern)
    assert child.returncode == -signal.SIGKILL, child.stdout + child.stderr
    if survivor == 1:
        unfinished = list(tmp_path.glob("2.orbax-checkpoint-tmp-*"))
        assert len(unfinished) == (event != "os.mkdir")
    left = sorted(tmp_path.iterdir())
    with Checkpoints(tmp_path, read_only=True) as reader:
        assert [reader.verify(step).step for step in reader.steps()][-1] == survivor
    assert sorted(tmp_path.iterdir()) == left  # a reader removes nothing
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert not [entry.name for entry in tmp_path.iterdir() if "tmp" in entry.name]
        found = checkpoints.restore_newest(target())
        assert found.step == survivor
        assert found.damaged == ()
        assert found.notes == {"tokens": survivor}
        np.testing.assert_array_equal(found.state["weight"], float(survivor))
        checkpoints.save(3, found.state, {"tokens": 3})
        checkpoints.wait()
        assert [entry.name for entry in tmp_path.iterdir()] == ["3"]


def test_a_reader_leaves_an_unfinished_save_alone(tmp_path):
    unfinished = tmp_path / "2.orbax-checkpoint-tmp-0123abcd"
    unfinished.mkdir()
    with Checkpoints(tmp_path, read_only=True) as reader:
        assert reader.steps() == []
        with pytest.raises(ValueError, match="opened read-only"):
            reader.save(1, {"weight": jnp.ones(2)}, {})
    assert unfinished.exists()


DISK_FULL = """
import os, resource, sys
import jax.numpy as jnp
from lmlib.checkpoint import Checkpoints

checkpoints = Checkpoints(sys.argv[1], keep=1)
checkpoints.save(1, {"weight": jnp.full(1 << 16, 1.0)}, {"tokens": 1})
checkpoints.wait()
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
checkpoints.save(2, {"weight": jnp.full(1 << 16, 2.0)}, {"tokens": 2})
try:
    checkpoints.wait()
except OSError as error:
    print(error)
print(checkpoints.steps(), *os.listdir(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
checkpoints.save(3, {"weight": jnp.full(1 << 16, 3.0)}, {"tokens": 3})
checkpoints.close()
print(checkpoints.steps())
"""


def test_a_save_on_a_full_disk_fails_and_the_last_checkpoint_stays(tmp_path):
    child = run_forked("-c", DISK_FULL, tmp_path)
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines() == [
        f"[Errno {errno.EFBIG}] cannot save step 2 in {tmp_path}: a file would be larger "
        "than this process may write (ulimit -f) (File too large)",
        "[1] 1",  # the incomplete step 2 is gone
        "[3]",  # and once there is room again, the run can save
    ]


LOSE_AN_ARRAY = """
import shutil, sys
import jax.numpy as jnp
from lmlib.checkpoint import Checkpoints

def lose(name, arguments):
    folder, _, file = str(arguments[0]).rpartition("/") if name == "open" else ("", "", "")
    if file.startswith(".manifest.json.") and "/2.orbax-checkpoint-tmp-" in folder:
        shutil.rmtree(f"{folder}/state/weight")

checkpoints = Checkpoints(sys.argv[1], keep=1)
checkpoints.save(1, {"weight": jnp.ones(4)}, {})
checkpoints.wait()
sys.addaudithook(lose)
checkpoints.save(2, {"weight": jnp.ones(4)}, {})
try:
    checkpoints.wait()
except FileNotFoundError as error:
    print(error)
print(checkpoints.steps(), checkpoints.newest_sound())
"""


def test_a_step_that_loses_files_while_it_is_saved_never_becomes_visible(tmp_path):
    child = run_forked("-c", LOSE_AN_ARRAY, tmp_path)
    assert child.returncode == 0, child.stderr
    assert f"cannot save step 2 in {tmp_path}: the directory was deleted" in child.stdout
    assert child.stdout.endswith("[1] 1\n")


def test_a_folder_that_cannot_be_made_fails_at_once(tmp_path):
    state = {"weight": jnp.ones(4)}
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(OSError, match="File name too long"):
            checkpoints.save(10**240, state, {})
        checkpoints.save(1, state, {})
        checkpoints.wait()
        assert checkpoints.steps() == [1]


def test_a_moved_directory_is_named_and_not_made_again(tmp_path):
    directory = tmp_path / "checkpoints"
    state = {"weight": jnp.ones(4)}
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        directory.rename(tmp_path / "elsewhere")
        with pytest.raises(FileNotFoundError, match=f"save step 2 in {directory}: the directory w"):
            checkpoints.save(2, state, {})
        assert not directory.exists()  # no run goes on in a new directory without its checkpoints
        (tmp_path / "elsewhere").rename(directory)
        checkpoints.save(2, state, {})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2]


def test_a_deleted_directory_is_made_again_for_the_next_save(tmp_path):
    directory = tmp_path / "run" / "checkpoints"
    state = {"weight": jnp.ones(4)}
    with Checkpoints(directory) as checkpoints:
        for step in (1, 2, 3):
            assert checkpoints.deleted == (step > 1)
            checkpoints.save(step, state, {})
            checkpoints.wait()
            assert checkpoints.newest_sound() == step
            shutil.rmtree(directory)
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(OSError, match=f"save step 4 in {directory}: the directory was deleted"):
            checkpoints.save(4, state, {})
        assert not (tmp_path / "run").exists()


def test_a_directory_moved_during_a_save_is_not_made_again(tmp_path):
    directory = tmp_path / "checkpoints"
    state = {f"weight_{n}": jnp.ones(SIZE) for n in range(64)}
    with contextlib.suppress(OSError), Checkpoints(directory) as checkpoints:
        checkpoints.save(1, state, {})
        directory.rename(tmp_path / "elsewhere")
    assert os.listdir(tmp_path) == ["elsewhere"]


@pytest.mark.parametrize("ended", [False, True])
def test_a_directory_taken_by_another_run_is_left_unchanged(tmp_path, ended):
    """The other run takes it during a save, whose folder it has removed or not."""
    others = tmp_path / "7.orbax-checkpoint-tmp-0123abcd"
    state, lost = {"weight": jnp.ones(4)}, []

    def check() -> None:
        if lost:
            raise RuntimeError("another's")

    def lose() -> None:
        lost.append(True)
        others.mkdir()
        if ended:
            (own,) = tmp_path.glob("2.orbax-checkpoint-tmp-*")
            shutil.rmtree(own)

    anothers = pytest.raises(RuntimeError, match="another's")
    with anothers, Checkpoints(tmp_path, keep=1, check=check) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.save(2, state, {}, beforehand=lose)
        for act in (checkpoints.wait, lambda: checkpoints.rank(1, 0.5)):
            with pytest.raises(RuntimeError, match="another's"):
                act()
        with pytest.raises(RuntimeError, match="another's"):
            checkpoints.save(3, state, {})
    with pytest.raises(RuntimeError, match="another's"):
        Checkpoints(tmp_path, check=check)
    left = sorted(path.name.partition(".")[0] for path in tmp_path.iterdir())
    assert left == (["1", "7"] if ended else ["1", "2", "7"])


def test_two_runs_save_the_same_step_into_different_folders(tmp_path):
    """The first run sleeps in its save until another one has taken over."""
    folders, sleeps, others_is_whole = [], threading.Event(), threading.Event()

    def note() -> None:
        folders.extend(tmp_path.glob("2.*"))

    def sleep() -> None:
        note()
        sleeps.set()
        assert others_is_whole.wait(60)

    asleep = Checkpoints(tmp_path)
    asleep.save(2, {"weight": jnp.ones(4)}, {}, beforehand=sleep)
    assert sleeps.wait(60)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, {"weight": jnp.zeros(4)}, {}, beforehand=note)
        checkpoints.wait()
        others_is_whole.set()
        with pytest.raises(OSError, match="cannot save step 2"):
            asleep.close()
        checkpoints.verify(2)
    first, second = folders
    assert first != second


def test_a_path_that_is_no_directory_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=f"cannot open the checkpoints in {tmp_path}/file/below: "):
        Checkpoints(tmp_path / "file" / "below")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_may_not_be_written_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="this user may not write there"):
        Checkpoints(tmp_path / "checkpoints")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, r"the disk is full, [\d,]+ bytes are free"),
        (errno.EDQUOT, "quota is exceeded"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "may not write there"),
    ],
)
def test_the_cause_is_found_in_any_error_of_the_storage(tmp_path, code, words):
    text = ValueError(f"Error writing local file: Failed writing [os_error_code='{code}']")
    chained = RuntimeError("save failed")
    chained.__cause__ = OSError(code, os.strerror(code))
    for error in (OSError(code, os.strerror(code)), text, chained):
        with pytest.raises(OSError, match=words) as named, named_errors("save step 2", tmp_path):
            raise error
        assert named.value.errno == code


def test_errors_that_are_not_of_the_storage_keep_their_text(tmp_path):
    late = f"^cannot save step 2 in {re.escape(str(tmp_path))}: another process has not written"
    for error, message in (
        (TimeoutError("another process has not written its part in 9 s"), late),
        (ValueError("shapes differ"), r"^shapes differ$"),
    ):
        with pytest.raises(type(error), match=message), named_errors("save step 2", tmp_path):
            raise error
