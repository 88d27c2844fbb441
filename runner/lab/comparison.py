"""A candidate beside the baseline of a task, from programs to the signed verdict."""

import contextlib
import dataclasses
import functools
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import fiddle as fdl
import numpy as np

from lmlib.data.batch import Source
from lmlib.data.flat_tokens import FlatTokens
from lmlib.storage.atomic_file import make_folder, write_atomically
from lmlib.terminal.quantities import bytes_text, count_text, duration_text
from lmlib.terminal.table import columns, wrapped
from lmlib.verdicts.comparison import USUAL_ERROR_RATE
from runner.config import configs
from runner.config.code import code_files, versions
from runner.errors import ConfigError
from runner.lab.digests import (
    check_unchanged,
    digest_of,
    digest_of_file,
    digests_of_data,
)
from runner.lab.exporting import Request
from runner.lab.programs import OF_MODELS, Arm, Program, candidate_arm, exported, read
from runner.lab.trial import Trial, check_causal, cpu_seconds_per_step, digest_of_batches, train
from runner.lab.verdict import FORMAT, Check, judged, seeds_of, signed, trial_json, trial_of
from runner.monitoring.progress_line import LiveLine, bar, now_and_then

_EVALUATIONS = 20  # with steps_to
VERDICT = "verdict.json"


@dataclasses.dataclass(frozen=True)
class Task:
    """An experiment that both sides train: its reference, fiddlers and overrides."""

    reference: str
    fiddlers: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """The arguments of `runner.config.configs.load`."""
        name = f"experiments/{self.reference}"
        return name if name in configs.experiments() else self.reference


class Comparison:
    """A task, whose code and data must stay the same as long as this object is used."""

    def __init__(self, task: Task, workdir: Path):
        """Raises ConfigError if the task cannot be compared."""
        self._task, self._workdir, self._line = task, workdir, LiveLine(sys.stderr)
        self._cfg = cfg = configs.load(task.file, task.fiddlers, task.overrides)
        for name in ("data", "validation"):
            if fdl.get_callable(getattr(cfg, name)) is not FlatTokens:
                raise ConfigError(f"the task's {name} must be FlatTokens, which have a digest")
        if cfg.later_stages:
            raise ConfigError("the task has later_stages: the lab compares batches of one size")
        cfg.data.path = cfg.validation.path = fdl.build(cfg.data.path)
        self._validation: FlatTokens = fdl.build(cfg.validation)
        batches = self._validation.batches or cfg.evaluation.batches
        self._batches = [self._validation.batch(index) for index in range(batches)]
        self._code, self._data = self._digests_of_code(), self._digests_of_data()

    def judge(
        self, candidate: Path, *, seeds: int, equal: str, steps_to: float | None, margin: float,
        salt: str, key: bytes | None,
    ) -> dict[str, Any]:  # fmt: skip
        """Compares the module `candidate`, and writes and returns the verdict."""
        if not candidate.is_file() or not candidate.stem.isidentifier():
            raise ConfigError(f"--candidate={candidate} cannot be imported as a Python file")
        make_folder(self._workdir)
        file = self._workdir / "candidate" / candidate.name
        make_folder(file.parent)
        shutil.copyfile(candidate, file)
        digest = digest_of_file(file)
        steps = self._cfg.steps
        self._say("exporting the baseline")
        baseline = self.baseline(self._workdir / "baseline")
        self._say(f"exporting {candidate.name}, in a process of its own")
        arm = self.candidate(baseline, file, steps, self._workdir / "programs")
        if equal == "cpu_seconds":
            ours, theirs = cpu_seconds_per_step([arm, baseline], self._source(0))
            steps = max(1, round(steps * theirs / ours))
            self._say(
                f"a step takes {ours:.3f} CPU-seconds, the baseline's {theirs:.3f}: {steps:,} steps"
            )
            shutil.rmtree(self._workdir / "programs")
            arm = self.candidate(baseline, file, steps, self._workdir / "programs")
        arms = {"baseline": baseline, "candidate": arm}
        content: dict[str, Any] = {
            "format": FORMAT,
            "task": dataclasses.asdict(self._task),
            "candidate": {
                "module": candidate.name,
                "sha256": digest,
                "kind": "model" if _has_model(arm, baseline) else "optimizer",
            },
            "code": {
                "sha256": digest_of(self._code), "files": len(self._code), "versions": versions(),
                "programs": {name: _digests(each.programs) for name, each in arms.items()},
            },
            "data": {"splits": self._data, "validation_batches": digest_of_batches(self._batches)},
            "budget": {
                "equal": equal, "steps_to": steps_to, "margin": margin,
                "error_rate": USUAL_ERROR_RATE,
                "steps": {name: each.steps for name, each in arms.items()},
                "tokens_per_step": self._cfg.data.batch_size * self._cfg.data.sequence_length,
                "parameters": {name: each.parameters for name, each in arms.items()},
                "state_bytes": {name: each.state_bytes for name, each in arms.items()},
                "constants": {
                    name: {n: p.constants for n, p in each.programs.items()}
                    for name, each in arms.items()
                },
            },
            "salt": salt,
        }  # fmt: skip
        content["seeds"] = chosen = seeds_of(content, seeds)
        self._check_unchanged(file, digest)
        runs: dict[str, list[Trial]] = {name: [] for name in arms}
        with self._progress(sum(each.steps for each in arms.values()) * seeds) as tell:
            for number, seed in enumerate(chosen):
                for name, each in arms.items():
                    at = f"{name}, seed {number + 1} of {seeds}"
                    found = self.train(each, seed, steps_to, functools.partial(tell, at))
                    runs[name].append(found)
                    self._say(_result(at, found))
        self._check_unchanged(file, digest)
        content["runs"] = {n: [trial_json(each) for each in found] for n, found in runs.items()}
        content |= judged(runs["baseline"], runs["candidate"], content["budget"])
        whole = signed(content, key)
        text = json.dumps(whole, indent=1, allow_nan=False) + "\n"
        write_atomically(self._workdir / VERDICT, text)
        return whole

    def checks(self, content: Mapping[str, Any]) -> Iterator[Check]:
        """Checks the code, the data and the programs that `content` names."""
        code, candidate = content["code"], content["candidate"]
        yield Check(
            "the library and the task are the same here", digest_of(self._code) == code["sha256"]
        )
        mine = {"splits": self._data, "validation_batches": digest_of_batches(self._batches)}
        yield Check("training and validation data are the same here", mine == content["data"])
        file = self._workdir / "candidate" / Path(candidate["module"]).name
        same = file.is_file() and digest_of_file(file) == candidate["sha256"]
        yield Check(f"{file} is the candidate's module", same)
        arms = self._arms(content)
        found = {name: _digests(each.programs) for name, each in arms.items()}
        yield Check(
            "the stored programs are the ones that the verdict names", found == code["programs"]
        )

    def rerun(self, content: Mapping[str, Any]) -> Iterator[Check]:
        """Exports both sides again, and trains the first seed of each again."""
        steps, budget = content["budget"]["steps"], content["budget"]
        file = self._workdir / "candidate" / Path(content["candidate"]["module"]).name
        with tempfile.TemporaryDirectory() as place:
            self._say("exporting both sides again")
            baseline = self.baseline(Path(place, "baseline"))
            again = self.candidate(baseline, file, steps["candidate"], Path(place, "programs"))
        arms = {"baseline": baseline, "candidate": again}
        programs = {name: _digests(each.programs) for name, each in arms.items()}
        yield Check("the module gives the same programs", programs == content["code"]["programs"])
        with self._progress(sum(steps.values())) as tell:
            for name, arm in self._arms(content).items():
                stated = trial_of(content["runs"][name][0])
                show = functools.partial(tell, f"{name}, first seed")
                found = self.train(arm, stated.seed, budget["steps_to"], show)
                same = (found.losses, found.weights, found.batches) == (
                    stated.losses, stated.weights, stated.batches,
                )  # fmt: skip
                yield Check(f"the first seed of the {name} gives the same bits", same)
        self._check_unchanged(file, content["candidate"]["sha256"])

    def _arms(self, content: Mapping[str, Any]) -> dict[str, Arm]:
        steps = content["budget"]["steps"]
        baseline = Arm(read(self._workdir / "baseline", "the baseline"), steps["baseline"])
        made = read(self._workdir / "programs", "the candidate")
        candidate = candidate_arm(baseline, made, steps["candidate"])
        return {"baseline": baseline, "candidate": candidate}

    def _exported(self, candidate: Path | None, steps: int, folder: Path) -> dict[str, Program]:
        task, module = self._task, None if candidate is None else str(candidate.absolute())
        # The process opens no data: it gets only the sizes.
        reference = str(Path(task.file).absolute()) if Path(task.file).is_file() else task.file
        to = str(folder.absolute())
        request = Request(reference, task.fiddlers, task.overrides, module, steps, to)
        made = exported(request, "the baseline" if candidate is None else candidate.name)
        if candidate is not None:
            self._check_unchanged()
        return made

    def baseline(self, folder: Path) -> Arm:
        """Exports the task as it is, into `folder`."""
        steps = self._cfg.steps
        return Arm(self._exported(None, steps, folder), steps)

    def candidate(self, baseline: Arm, file: Path, steps: int, folder: Path) -> Arm:
        """Exports the module `file` into `folder`; raises ConfigError if it is refused."""
        arm = candidate_arm(baseline, self._exported(file, steps, folder), steps)
        if _has_model(arm, baseline):
            check_causal(arm, self._batches[0])
        return arm

    def _source(self, seed: int) -> Source:
        source: Source = fdl.build(fdl.copy_with(self._cfg.data, seed=seed))
        return source

    def train(
        self, arm: Arm, seed: int, steps_to: float | None = None,
        show: Callable[[int], None] = lambda step: None,
    ) -> Trial:  # fmt: skip
        """Trains and evaluates a seed of an arm, on the task's data."""
        count = 1 if steps_to is None else _EVALUATIONS
        at = {math.ceil(arm.steps * part / count) for part in range(1, count + 1)}
        return train(arm, seed, self._source(seed), self._batches, at, show)

    def _digests_of_code(self) -> dict[str, str]:
        return code_files(self._cfg, configs.experiment_file(self._task.file))

    def _digests_of_data(self) -> dict[str, str]:
        cfg = self._cfg
        return digests_of_data(cfg.data.path, (cfg.data.split, cfg.validation.split))

    def _check_unchanged(self, file: Path | None = None, digest: str = "") -> None:
        check_unchanged(self._code, self._digests_of_code(), "the code")
        check_unchanged(self._data, self._digests_of_data(), "the data")
        if file is not None:
            check_unchanged({file.name: digest}, {file.name: digest_of_file(file)}, "the module")

    def _say(self, text: str) -> None:
        self._line.message(wrapped(text))

    @contextlib.contextmanager
    def _progress(self, total: int) -> Iterator[Callable[[str, int], None]]:
        """Yields a function that counts a step; shown as a bar, or as lines elsewhere."""
        done, elsewhere = 0, now_and_then(self._line.message)

        def tell(what: str, step: int) -> None:
            nonlocal done
            done += 1
            if self._line.live:
                self._line.line = f"{bar(done / total)} {what}  step {step:,}"
                self._line.draw()
            else:
                elsewhere(lambda: f"{what}  step {step:,}  {done / total:.0%} of all steps")

        try:
            yield tell
        finally:
            self._line.close(keep=False)


def _has_model(arm: Arm, baseline: Arm) -> bool:
    return any(arm.programs[name] is not baseline.programs[name] for name in OF_MODELS)


def _digests(programs: Mapping[str, Program]) -> dict[str, str]:
    return {name: each.digest for name, each in sorted(programs.items())}


def _result(at: str, trial: Trial) -> str:
    spent = f"{duration_text(trial.cpu_seconds)} of CPU time for {trial.steps:,} steps"
    return f"{at}: validation loss {trial.loss:.4f} nats per token, {spent}"


def table(content: Mapping[str, Any]) -> str:
    """Returns the verdict as a table with a sentence."""
    budget, target = content["budget"], content["budget"]["steps_to"]
    titles = ["", "seeds", "weights", "state", "steps", "CPU-seconds per step", "validation loss"]
    titles += [] if target is None else [f"steps to {target:g}"]
    rows = [titles]
    for name, found in content["runs"].items():
        trials = [trial_of(each) for each in found]
        per_step = np.mean([each.cpu_seconds / each.steps for each in trials])
        cells = [name, str(len(trials)), count_text(budget["parameters"][name])]
        cells += [bytes_text(budget["state_bytes"][name]), f"{budget['steps'][name]:,}"]
        cells += [f"{per_step:.4f}", _mean([each.loss for each in trials], 4)]
        if target is not None:
            reached = [each.steps_to(target) for each in trials]
            whole = [each for each in reached if each is not None]
            cells.append(_mean(whole, 0) if len(whole) == len(reached) else "not reached")
        rows.append(cells)
    return f"{columns(rows)}\n\n{wrapped(sentence(content))}"


def sentence(content: Mapping[str, Any]) -> str:
    """Returns the verdict in words."""
    target = content["budget"]["steps_to"]
    measure = content["measures"]["loss" if target is None else "steps_to"]
    unit = "nats per token" if target is None else f"steps to {target:g}"
    begun = f"Verdict: {content['candidate']['module']} is {content['verdict']}"
    if content["verdict"] == "inconclusive":
        begun = f"Verdict: inconclusive for {content['candidate']['module']}"
    if measure.get("not_reached"):
        return f"{begun}, since not all runs reached {target:g}."
    if measure.get("not_finite"):
        return f"{begun}, since a loss is not finite."
    error = measure["standard_error"]
    spread = "" if error is None else f" ± {error:.4g}"
    text = f"{begun}: {measure['mean']:+.4g}{spread} {unit}, over {measure['seeds']} pairs of seeds"
    text += f", at equal {'tokens' if content['budget']['equal'] == 'tokens' else 'CPU-seconds'}."
    if (effect := measure["smallest_effect"]) is not None:
        text += f" These seeds detect a difference of {effect:.2g} with 80 % power."
    if content["verdict"] == "inconclusive" and (needed := measure["seeds_needed"]):
        text += f" --seeds={needed} would judge a difference of this size."
    return text


def _mean(values: list[float], digits: int) -> str:
    mean = f"{np.mean(values):.{digits}f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {np.std(values, ddof=1) / math.sqrt(len(values)):.{digits}f}"
