"""Records the config and code of each start of a run, once it has made a step.

    workdir/starts/00000/config.json     the config, to launch the run again
                         settings.json   every setting of the config, by path
                         config.txt      the config, for people to read
                         start.json      the time, first step, code, settings and lock token

The config files directly in the workdir are copies from the newest start.
"""

import json
import socket
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import fiddle as fdl
import jax

import lmlib
from lmlib.checkpoint.folders import steps_in
from lmlib.runs.starts import newest_start, start_folders
from lmlib.storage.atomic_file import make_folder, write_atomically
from runner.config import configs
from runner.config.code import code_files, commit_of, versions
from runner.config.text import changed_paths, printable
from runner.errors import ConfigError
from runner.jax_settings import numbers
from runner.jax_settings.xla_flags import flags_of_the_run
from runner.processes.lock import WorkdirLock

_SHOWN = 8  # changed files that a message names


class Start:
    """The facts about one start of a run; written to disk after its first step."""

    def __init__(self, cfg: fdl.Config, workdir: Path, experiment: Path | None):
        """Collects the facts; raises ConfigError if `cfg` cannot be saved."""
        self.code = code_files(cfg, experiment)
        self.versions = versions()
        self.jax_settings = numbers.settings_of_numbers()
        self.xla_flags = {k: v for flags in flags_of_the_run().values() for k, v in flags.items()}
        self._began = time.time()
        self._experiment, self._workdir = experiment, workdir
        self._config = configs.saved_files(cfg)

    @property
    def software(self) -> dict[str, Mapping[str, str]]:
        """Code, versions and settings that all processes must share, for `require_same`."""
        return {
            "the code": self.code,
            "the software": self.versions,
            "the configuration of JAX": numbers.settings_of_the_run(),
            **flags_of_the_run(),
        }

    def tell_changes(self, tell: Callable[[str], None]) -> None:
        """Reports changes to code, packages and XLA flags since the run was last trained."""
        before, found = newest_start(self._workdir), dict[str, list[str]]()
        code, packages, flags = (before.get(name) for name in ("code", "versions", "xla_flags"))
        if isinstance(code, dict) and isinstance(packages, dict):
            updated = _changed(packages, self.versions, "{name} {was} → {now}")
            files = sorted(_changed(code, self.code, "{name}"))
            more = [f"and {len(files) - _SHOWN} more files"] if len(files) > _SHOWN else []
            found["the code has"] = [*updated, *files[:_SHOWN], *more]
        if isinstance(flags, dict):
            found["flags of XLA have"] = _changed(flags, self.xla_flags, "{name}: {was} → {now}")
        for what, changes in found.items():
            if changes:
                text = printable(", ".join(changes))
                tell(f"{what} changed since this run was last trained: {text}")

    def check_jax_settings(
        self, allowed_changes: Collection[str], tell: Callable[[str], None]
    ) -> None:
        """Checks JAX's settings against the previous start's, if the run has checkpoints."""
        before = newest_start(self._workdir).get("jax_settings")
        if not isinstance(before, dict) or not steps_in(self._workdir / "checkpoints"):
            return
        if not (changes := numbers.changes(before, self.jax_settings)):
            return
        told = f"{self._workdir} was trained with other settings of JAX: {printable(changes)}"
        is_kept = "JAX_DEFAULT_PRNG_IMPL" in changes  # checkpoints hold a key of that type
        if is_kept or "jax" not in allowed_changes:
            go_on = "" if is_kept else ", or continue with --allow_change=jax"
            raise ConfigError(
                f"{told}. The same step would give other numbers: set these environment variables "
                f"as they were, or use another workdir{go_on}"
            )
        tell(f"WARNING: {told}; continuing, since --allow_change=jax was given")

    def record(self, first_step: int, lock: WorkdirLock, **about: Any) -> None:
        """Writes this start to disk, with the facts `about` the model and its objective.

        Process 0 calls it after the first step.

        Raises WorkdirLost if another run has taken over the workdir, and OSError.
        """
        number = max((int(folder.name) + 1 for folder in start_folders(self._workdir)), default=0)
        folder = self._workdir / "starts" / f"{number:05}"
        lock.check()
        make_folder(folder)
        experiment = self._experiment and commit_of(self._experiment.resolve())
        facts = {
            "began": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(self._began)),
            "first_step": first_step,
            "start": lock.start,
            **about,
            "host": socket.gethostname(),
            "processes": jax.process_count(),
            "versions": self.versions,
            "jax_settings": self.jax_settings,
            "xla_flags": self.xla_flags,
            "git": {"lmlib": commit_of(Path(lmlib.__file__).resolve()), "experiment": experiment},
            "code": self.code,
        }
        # start.json is written last, so a start that lacks it is incomplete.
        for name, content in (self._config | {"start.json": json.dumps(facts, indent=1)}).items():
            write_atomically(folder / name, content, lock.check)
        for name, content in self._config.items():
            write_atomically(self._workdir / name, content, lock.check)


def _changed(before: Mapping[str, str], now: Mapping[str, str], form: str) -> list[str]:
    """Formats each entry that differs with the template `form`."""
    return [
        form.format(name=name, was=before.get(name, "absent"), now=now.get(name, "absent"))
        for name in changed_paths(now, before)
    ]
