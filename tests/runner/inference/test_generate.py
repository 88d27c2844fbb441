"""The command that continues texts, chats, and answers files."""

import contextlib
import json
import os
import pty
import subprocess

import pytest
from forked_processes import SECONDS, ForkedProcess, run_forked
from run_on_bytes import write_run_on_bytes

PROMPTS = [{"prompt": "é", "id": 7}, {"tokens": [256, 97]}, {"prompt": "one two"}]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return write_run_on_bytes(tmp_path_factory.mktemp("generate"))[0]


@pytest.mark.slow
def test_a_file_of_prompts_is_answered(workdir, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in PROMPTS))
    files = (f"--from={workdir}@3", f"--prompts={prompts}", f"--out={out}")
    arguments = (*files, "--max_tokens=4", "--samples=2", "--rows=8")
    ended = run_forked("-m", "runner.generate", *arguments)
    assert ended.returncode == 0, ended.stderr
    said = [json.loads(line) for line in out.read_text().splitlines()]
    assert [each["given"] for each in said[::2]] == PROMPTS
    assert ended.stdout == ""
    assert f"{out} has the answers to all 3 lines of {prompts}" in ended.stderr


@pytest.mark.slow
def test_prompts_are_continued(workdir):
    arguments = (f"--from={workdir}", "--prompt=hé", "--prompt=b", "--max_tokens=5", "--samples=2")
    ended = run_forked("-m", "runner.generate", *arguments)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("--- 1 of 2\nhé")
    assert [ended.stdout.count(each) for each in ("--- 2 of 2\nhé", "--- 2 of 2\nb")] == [1, 1]
    assert ended.stderr.count("; the first after ") == 2
    assert run_forked("-m", "runner.generate", *arguments).stdout == ended.stdout
    ids = run_forked("-m", "runner.generate", arguments[0], "--tokens=256,104", "--max_tokens=5")
    assert ids.stdout.startswith("h")


@pytest.mark.slow
def test_what_is_piped_is_continued(workdir):
    def answer(*flags: str, piped: str) -> str:
        command = ("-m", "runner.generate", f"--from={workdir}", "--max_tokens=5", *flags)
        ended = run_forked(*command, piped=piped)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    assert answer(piped="hé\nb\n") == answer("--prompt=hé\nb", piped="unread")


@pytest.mark.slow
def test_a_command_that_is_killed_goes_on(workdir, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(64)))

    def command(out):
        flags = (f"--from={workdir}", f"--prompts={prompts}", f"--out={out}", "--rows=8")
        return ("-m", "runner.generate", *flags, "--max_tokens=16")

    whole, out, told = tmp_path / "whole.jsonl", tmp_path / "out.jsonl", tmp_path / "told"
    with told.open("w") as file:
        process = ForkedProcess(*command(out), stdout=file, stderr=file)
    while not out.exists() or out.stat().st_size == 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert process.wait(0.01) is None, told.read_text()
    process.kill()
    process.wait()
    assert out.read_bytes().count(b"\n") < 64
    assert "lines are answered already" in run_forked(*command(out)).stderr
    assert run_forked(*command(whole)).returncode == 0
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.slow
def test_texts_are_typed_on_a_terminal(workdir, tmp_path):
    ours, its = pty.openpty()
    with (tmp_path / "shown").open("w") as shown:
        process = ForkedProcess(
            *("-m", "runner.generate", f"--from={workdir}", "--max_tokens=5"),
            stdin=its,
            stdout=shown,
            stderr=shown,
        )
    os.close(its)
    os.write(ours, "hé\nb\n\x04".encode())
    returncode = process.wait(SECONDS)
    os.close(ours)
    text = (tmp_path / "shown").read_text()
    assert returncode == 0, text
    assert f"{workdir}@3: each text is continued; Ctrl-C ends an answer, Ctrl-D all" in text
    assert text.count("; the first after ") == 2
