"""What readers find while a run removes the checkpoints that it need not keep."""

from forked_processes import run_forked

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


def test_what_is_missing_in_a_folder_that_is_there_is_damage(tmp_path):
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
    """Not when its first file is about to go, nor its last folder."""
    reads = """
seen = lambda: print(reader.steps(), *sorted(os.listdir(directory)))
during("shutil.rmtree", "/1[./]", seen)
during("os.rmdir", "/1[./]", seen)
save(2)
seen()
"""
    half = "[2] 1.orbax-checkpoint-tmp-removed 2"
    assert lines(reads, tmp_path) == [half, half, "[2] 2"]


def test_what_nfs_keeps_for_a_reader_fails_no_save_and_goes_later(tmp_path):
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


def test_another_directory_that_takes_the_place_of_a_runs_loses_nothing(tmp_path):
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
