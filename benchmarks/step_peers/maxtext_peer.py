"""MaxText's training step with the same shapes, precision and optimizer, in its own process.

    pip install maxtext    # Python 3.12 or later; it may ask for more packages when it starts

It uses its own weights and synthetic data, so its losses are not compared. It cannot pause between
turns, so it runs after the others. Its CPU seconds are Linux's count for its process between two
reports of steps.
"""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from step_peers.measure import TURN, Measurement
from step_peers.work import Work

TRAIN = "maxtext.trainers.pre_train.train"
_STEP = re.compile(r"completed step: (\d+), .*? loss: (\S+?),")


def installed() -> bool:
    return importlib.util.find_spec("maxtext") is not None


def command(work: Work, folder: str) -> list[str]:
    """Returns MaxText's command line for the work; it writes into `folder`."""
    size, adamw, settings = work.size, work.size.adamw, work.size.settings
    package = importlib.util.find_spec("maxtext")
    assert package is not None and package.origin is not None
    heads = settings["heads"]
    options = {
        "run_name": "benchmark",
        "base_output_directory": folder,
        "hardware": "cpu",
        "dataset_type": "synthetic",
        "enable_checkpointing": False,
        "skip_jax_distributed_system": True,
        "steps": work.steps,
        "log_period": 1,
        "decoder_block": "llama2",
        "attention": "dot_product",
        "base_emb_dim": settings["embed"],
        "base_num_decoder_layers": settings["layers"],
        "base_num_query_heads": heads,
        "base_num_kv_heads": settings.get("kv_heads") or heads,
        "head_dim": settings.get("head_dim") or settings["embed"] // heads,
        "base_mlp_dim": settings["mlp"],
        "vocab_size": settings["vocab"],
        "per_device_batch_size": size.batch,
        "max_target_length": size.sequence,
        "dtype": work.precision,
        "weight_dtype": "float32",
        "remat_policy": "full" if size.recomputed else "minimal_with_context",
        "opt_type": "adamw",
        "learning_rate": adamw.learning_rate,
        "adam_b1": adamw.b1,
        "adam_b2": adamw.b2,
        "adam_eps": adamw.epsilon,
        "adam_weight_decay": adamw.weight_decay,
        "gradient_clipping_threshold": adamw.clip_norm,
    }
    configs = Path(package.origin).parent / "configs" / "base.yml"
    arguments = [f"{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", TRAIN, str(configs), *arguments]


def measured(work: Work) -> Measurement:
    """Runs MaxText. Raises RuntimeError with its last line if it ends before its last step."""
    found = Measurement()
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE"}
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command(work, folder),
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        last_line, wall, cpu = "", 0.0, 0.0
        for line in process.stderr:
            last_line = line.strip() or last_line
            report = _STEP.search(line)
            if report is None:
                continue
            found.losses.append(float(report[2]))
            if len(found.losses) % TURN == 0:
                now, used = time.perf_counter(), cpu_seconds(process.pid)
                if len(found.losses) > TURN:  # the first turn warms up
                    found.wall_seconds.append(now - wall)
                    found.cpu_seconds.append(used - cpu)
                wall, cpu = now, used
        process.wait()
    if len(found.losses) < work.steps:
        raise RuntimeError(f"MaxText ended after {len(found.losses)} steps: {last_line}")
    return found


def cpu_seconds(process: int) -> float:
    """Returns the CPU time of all threads of the process so far."""
    # Fields 14 and 15 of /proc/PID/stat (man 5 proc); the second field may hold spaces.
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
