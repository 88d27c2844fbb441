"""What a run does by itself every so many steps: it is saved, evaluated and sampled."""

import dataclasses
from collections.abc import Mapping, Sequence

from lmlib.data.prefetch import Prefetch
from lmlib.data.resumable import gather_states
from lmlib.experiment import Every, Experiment, Moment
from runner.monitoring.progress import Progress
from runner.processes.lock import WorkdirLock
from runner.training.samples import Samples
from runner.training.saving import Saver
from runner.training.validation import Validation


@dataclasses.dataclass(frozen=True)
class Saving:
    """Begins to save the state; with that of a `Resumable` source, every process's."""

    saver: Saver
    batches: Prefetch

    def __call__(self, now: Moment) -> None:
        state = self.batches.state
        data = None if state is None else gather_states(state)
        self.saver.save(dict(now.metrics), now.state, data)


@dataclasses.dataclass(frozen=True)
class Evaluating:
    """Evaluates the model, and ranks the checkpoint of the step."""

    validation: Validation
    saver: Saver
    lock: WorkdirLock
    progress: Progress

    def __call__(self, now: Moment) -> Mapping[str, float]:
        metrics = self.validation.metrics(now.state)
        self.lock.check()
        # First, since a line that has them says that the evaluation is done.
        self.saver.rank(now.step, metrics)
        self.progress.validated(now.step, self.validation.text(metrics))
        return metrics


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Continues the prompts, and shows the first of them; not after the last step, whose samples
    belong to the summary."""

    samples: Samples
    last: int

    def __call__(self, now: Moment) -> None:
        if now.step == self.last:
            return
        texts = self.samples.write(now.step, now.state.whole_model)
        if texts:
            now.tell(f"sampled after step {now.step:,}: {texts[0]!r:.200}")


def others(
    experiment: Experiment,
    evaluating: Evaluating | None,
    sampling: Sampling,
    own: Sequence[Every],
) -> list[Every]:
    """What a run does every so many steps after it is saved, in order; `own` is the user's."""
    of_ours = []
    if evaluating is not None:
        of_ours.append(Every(experiment.evaluation.every, evaluating, at_end=True))
    if experiment.samples.every is not None:
        of_ours.append(Every(experiment.samples.every, sampling))
    return [*of_ours, *experiment.actions, *own]
