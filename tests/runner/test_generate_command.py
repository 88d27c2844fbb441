"""The command that continues texts, chats, and answers files."""

import contextlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from forked_processes import run_forked
from run_on_bytes import write_run_on_bytes

import runner

ROOT = Path(runner.__file__).parents[1]
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
    command = [sys.executable, "-m", "runner.generate", f"--from={workdir}", "--max_tokens=5"]

    def answer(*flags: str, piped: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*command, *flags], cwd=ROOT, env=environment, input=piped, capture_output=True,
            text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert answer(piped="hé\nb\n") == answer("--prompt=hé\nb", piped="unread")


@pytest.mark.slow
def test_a_command_that_is_killed_goes_on(workdir, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(64)))

    def command(out):
        flags = (f"--from={workdir}", f"--prompts={prompts}", f"--out={out}", "--rows=8")
        return subprocess.Popen(
            [sys.executable, "-m", "runner.generate", *flags, "--max_tokens=16"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )

    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    process = command(out)
    while not out.exists() or out.stat().st_size == 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert process.wait(0.01) is None, process.stderr.read()
    process.kill()
    process.communicate()
    assert out.read_bytes().count(b"\n") < 64
    again = command(out)
    assert "lines are answered already" in again.communicate()[1]
    assert command(whole).wait() == 0
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.slow
def test_texts_are_typed_on_a_terminal(workdir):
    ours, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "runner.generate", f"--from={workdir}", "--max_tokens=5"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=its,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    os.close(its)
    os.write(ours, "hé\nb\n\x04".encode())
    shown, _ = process.communicate()
    os.close(ours)
    text = shown.decode()
    assert process.returncode == 0, text
    assert f"{workdir}@3: each text is continued; Ctrl-C ends an answer, Ctrl-D all" in text
    assert text.count("; the first after ") == 2
