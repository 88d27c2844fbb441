"""Measurements of the system, against other counts of the operating system."""

import itertools
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from runner.monitoring.system import SystemMetrics

GPU = SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_in_use": 7})
CPU = SimpleNamespace(platform="cpu", memory_stats=lambda: None)


@pytest.mark.parametrize(
    ("seconds", "later", "apart"), [(0.01, 0.01, 512), (1.5, 1.5, 16), (1.5, 30.0, 1)]
)
def test_measurements_are_sparse_and_at_steps_that_other_runs_measure_too(seconds, later, apart):
    now, measured_at, steps, cpu_seconds = [0.0], 0.0, [], 0.0
    system, before = SystemMetrics([CPU], lambda: now[0]), sum(os.times()[:2])
    for step in range(1, 2_001):
        now[0] += seconds if step < 1_000 else later
        if measured := system.at(step):
            steps.append(step)
            cpu_seconds += measured["cpu_cores"] * (now[0] - measured_at)
            measured_at = now[0]
    assert steps[:4] == [1, 2, 4, 8] and steps[-1] - steps[-2] == apart
    assert all(step % (step - last) == 0 for last, step in itertools.pairwise(steps))
    assert cpu_seconds == pytest.approx(sum(os.times()[:2]) - before, abs=0.05)


def test_memory_is_that_of_the_operating_system():
    filled = np.ones(50_000_000)
    measured = SystemMetrics([CPU]).at(1)
    status = Path("/proc/self/status").read_text()
    resident = 1024 * int(re.search(r"VmRSS:\s+(\d+) kB", status)[1])
    assert measured["process_memory_bytes"] == pytest.approx(resident, rel=0.02)
    assert measured["process_memory_bytes"] > filled.nbytes
    assert measured.keys() == {"process_memory_bytes", "cpu_cores"}


def test_gpus_are_asked_without_waiting_for_the_answer(tmp_path, monkeypatch):
    command = tmp_path / "nvidia-smi"
    command.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$0.asked"; read x < "$0.go"\n'
                       'printf "50\\n[N/A]\\n90\\n"\n')  # fmt: skip
    command.chmod(0o755)
    os.mkfifo(tmp_path / "nvidia-smi.go")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-7,2")
    system = SystemMetrics([GPU, GPU])
    first = system.at(1)
    assert first["device_memory_bytes"] == 7 and "gpu_utilization" not in first
    assert system.at(3) == {}  # it has not answered yet
    (tmp_path / "nvidia-smi.go").write_text("\n")
    until = time.monotonic() + 60
    answers = (system.at(step) for step in itertools.count(5, 2))
    answer = next(each for each in answers if each or time.monotonic() > until)
    assert answer == {"gpu_utilization": 0.7}
    asked = (tmp_path / "nvidia-smi.asked").read_text().splitlines()
    assert asked[0] == "--query-gpu=utilization.gpu" and asked[-1] == "--id=1,GPU-7,2"
