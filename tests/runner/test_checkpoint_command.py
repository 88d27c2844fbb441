"""`python -m runner.checkpoint` on real checkpoints."""

import shutil

import jax
import jax.numpy as jnp
import pytest
from absl import flags
from forked_processes import run_forked

from lmlib.checkpoint import Checkpoints
from runner import checkpoint
from runner.errors import ConfigError
from runner.processes.lock import FolderLock


@pytest.fixture(scope="module")
def command():
    """Takes the arguments, and gives exit status, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        ended = run_forked("-m", "runner.checkpoint", *map(str, arguments))
        return ended.returncode, ended.stdout, ended.stderr

    return run


@pytest.fixture
def workdir(tmp_path):
    state = {"weight": jnp.ones((3, 1024), jnp.bfloat16), "key": jax.random.key(0)}
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        for step in (1000, 2000, 3000):
            checkpoints.save(step, state, {"tokens": 7 * step})
            checkpoints.rank(step, 3e3 / step)
    return tmp_path


def test_list_and_show(workdir, command):
    (workdir / "checkpoints/4000.orbax-checkpoint-tmp").mkdir()
    (workdir / "checkpoints/2000/manifest.json").unlink()
    status, output, _ = command("list", workdir)
    lines = output.splitlines()
    assert status == 0
    assert lines[0].split() == ["step", "saved", "at", "size", "arrays", "metric"]
    assert lines[1].split()[0] == "1,000"
    assert lines[1].split()[-2:] == ["2", "3"]
    assert lines[2].split() == ["2,000", "damaged"]
    assert "2000 is damaged: manifest.json is missing" in lines[4]
    assert lines[5].startswith("4000.orbax-checkpoint-tmp is being saved")
    assert len(lines) == 6

    status, output, _ = command("show", workdir / "checkpoints")
    assert status == 0
    assert output.startswith("step 3,000, saved at ")
    assert ["weight", "bfloat16", "3", "×", "1024", "6.14", "KB"] in [
        line.split() for line in output.splitlines()
    ]
    assert ["key", "key<fry>", "scalar", "8", "B"] in [line.split() for line in output.splitlines()]
    assert '"tokens": 21000' in output


def test_verify_and_prune(workdir, command):
    assert command("verify", workdir)[0] == 0
    chunk = workdir / "checkpoints/3000/state/weight/0.0"
    chunk.write_bytes(b"\1" + chunk.read_bytes()[1:])
    status, output, _ = command("verify", workdir)
    assert status == 1
    verdicts = [line.split()[2].strip(",:") for line in output.splitlines()]
    assert verdicts == ["sound", "sound", "DAMAGED"]
    assert f"{workdir}/checkpoints/3000 is damaged: state/weight/0.0 has other bytes" in output
    assert command("verify", workdir, "--step=2000")[0] == 0

    status, _, errors = command("prune", workdir, "--keep=1")
    assert status == 2
    assert "step 2000 is the newest sound checkpoint, and --keep=1 would remove it" in errors
    assert len(list((workdir / "checkpoints").iterdir())) == 3
    status, output, _ = command("prune", workdir, "--keep=2")
    assert status == 0
    assert output.splitlines() == [f"removed {workdir}/checkpoints/1000", "kept 2,000, 3,000"]
    assert sorted(entry.name for entry in (workdir / "checkpoints").iterdir()) == ["2000", "3000"]


class ListedBefore(Checkpoints):
    """Lists all three steps: a run that goes on has removed the first since."""

    def steps(self) -> list[int]:
        return [1000, 2000, 3000]


def test_what_a_run_removes_meanwhile_is_not_damaged(workdir, capsys):
    flags.FLAGS.mark_as_parsed()
    shutil.rmtree(workdir / "checkpoints/1000")
    with ListedBefore(workdir / "checkpoints", read_only=True) as checkpoints:
        assert checkpoint._verify(checkpoints, workdir / "checkpoints") == 0
        verdicts = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()]
        assert verdicts[0] == "removed by its run meanwhile"
        assert [verdict.split()[0] for verdict in verdicts[1:]] == ["sound,", "sound,"]
        assert checkpoint._list(checkpoints, workdir / "checkpoints") == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == ["step", "2,000", "3,000"]
        shutil.rmtree(workdir / "checkpoints")
        with pytest.raises(ConfigError, match="is removed by now: verify what it holds now"):
            checkpoint._verify(checkpoints, workdir / "checkpoints")


def test_prune_ends_what_another_began_and_touches_no_save(workdir, command):
    for name in ("500.orbax-checkpoint-tmp-removed", "4000.orbax-checkpoint-tmp"):
        (workdir / "checkpoints" / name / "state").mkdir(parents=True)
    status, output, _ = command("prune", workdir, "--keep=3")
    assert status == 0
    assert output.splitlines()[0].endswith("/500.orbax-checkpoint-tmp-removed")
    left = sorted(entry.name for entry in (workdir / "checkpoints").iterdir())
    assert left == ["1000", "2000", "3000", "4000.orbax-checkpoint-tmp"]


@pytest.mark.slow
def test_beside_a_run_checkpoints_are_shown_and_not_removed(workdir, command):
    with FolderLock(workdir):
        assert command("list", workdir)[0] == command("verify", workdir)[0] == 0
        for folder in (workdir, workdir / "checkpoints"):
            status, _, errors = command("prune", folder, "--keep=1")
            assert status == 2
            assert f"{workdir} is in use by the run of" in errors
    assert len(list((workdir / "checkpoints").iterdir())) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lst", "."], "unknown command 'lst'. Did you mean list?"),
        (["verify", "/no/such/folder"], "/no/such/folder is no folder"),
        (["show", ".", "--step=7"], "holds no checkpoint at step 7"),
        (["prune", "."], "give --keep"),
        (["list", ".", "--steps=7"], "steps"),
    ],
)
def test_bad_input_is_told_in_one_line(command, tmp_path, arguments, message):
    arguments = [str(tmp_path) if argument == "." else argument for argument in arguments]
    status, output, errors = command(*arguments)
    assert status == 2
    assert output == ""
    assert message in errors
    assert len(errors.splitlines()) == 1
