"""A folder that a command makes: whole or absent, by one command at a time."""

from pathlib import Path

import pytest
from forked_processes import ForkedProcess

from runner.command_line.new_folder import made_whole
from runner.errors import ConfigError

GOLDEN = Path(__file__).parents[2] / "hf" / "golden" / "llama"


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_of_two_commands_the_first_makes_it_and_the_other_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = Path("out")  # as the user writes it
    with made_whole(out) as unfinished:
        (unfinished / "first").write_text("")
        with pytest.raises(ConfigError) as refused, made_whole(out):
            pass
        assert str(refused.value).startswith("--to=out: another command makes it; give a new fol")
        assert names(unfinished) == ["first"] and not out.exists()
        with made_whole(Path("other")):
            pass
    with pytest.raises(ConfigError, match="=out is not empty: give a new"), made_whole(out):
        pass
    assert names(out) == ["first"]
    assert names(tmp_path) == ["other", "out"]


def test_what_a_kill_left_is_made_again(tmp_path):
    (tmp_path / ".out.unfinished" / "half").mkdir(parents=True)
    (tmp_path / ".out.lock").write_text("")
    with made_whole(tmp_path / "out") as unfinished:
        assert not names(unfinished)
    assert names(tmp_path) == ["out"]


def test_after_an_error_nothing_is_there_and_another_command_may_make_it(tmp_path):
    for _ in range(2):
        with pytest.raises(OSError, match="full"), made_whole(tmp_path / "new" / "out") as there:
            (there / "half").write_text("")
            raise OSError("the disk is full")
        assert names(tmp_path / "new") == []


@pytest.mark.slow
def test_of_two_conversions_at_once_one_wins(tmp_path):
    """By a lock that the kernel gives back after a kill."""
    arguments = ["-m", "runner.convert", f"--from={GOLDEN}", f"--to={tmp_path}/out"]
    both = []
    for name in ("0", "1"):
        with (tmp_path / name).open("w") as file:
            both.append(ForkedProcess(*arguments, stdout=file, stderr=file))
    assert sorted(process.wait() for process in both) == [0, 2]
    loser = next(number for number, process in enumerate(both) if process.wait() == 2)
    told = (tmp_path / str(loser)).read_text().splitlines()[-1]
    assert told.startswith(f"error: --to={tmp_path}/out") and "unfinished" not in told
    assert (tmp_path / "out" / "checkpoints" / "0").is_dir()
    assert names(tmp_path) == ["0", "1", "out"]
