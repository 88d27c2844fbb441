"""Stops a run after too many skipped updates, and names the first non-finite values."""

from typing import NoReturn

from lmlib.data.batch import Batch
from lmlib.experiment import Experiment
from lmlib.inspect.layer_statistics import LayerStatistics, first_offender, layer_statistics, table
from lmlib.state import State
from runner.errors import Diverged
from runner.training.run import Line
from runner.training.saving import Saver


def stop(experiment: Experiment, line: Line, state: State, batch: Batch, saver: Saver) -> NoReturn:
    """Raises Diverged after skipped updates up to the step of `line`; every process calls it.

    `state` is the newest state; skipped updates have left its weights unchanged.
    """
    in_a_row = line["skipped_in_a_row"]
    saver.settle()
    statistics = statistics_of(experiment, state, batch)
    offender = first_offender(statistics)
    if offender is None and experiment.guard.spike_deviations is None:
        offender = "the optimizer's update"
    found = (
        f"the first number that is not finite is in {offender}"
        if offender
        else "loss and gradients are finite, so the losses were spikes or the updates not finite"
    )
    newest = (
        "No checkpoint is from before them: begin again"
        if saver.before_skipped is None
        else f"The newest checkpoint from before them is step {saver.before_skipped:,}: continue "
        "from it"
    )
    raise Diverged(
        f"{in_a_row} updates in a row were skipped, up to step {line['step']:,} "
        f"({experiment.objective.loss_name} {line['loss']:.4g}, gradient norm "
        f"{line['grad_norm']:.4g}): {found}. {newest} "
        "with a lower learning rate or another seed of the data, or raise guard.stop_after.\n"
        f"{table(statistics)}"
    )


def statistics_of(experiment: Experiment, state: State, batch: Batch) -> LayerStatistics:
    """Returns `layer_statistics` for the experiment's objective."""
    return layer_statistics(
        state.whole_model,
        batch,
        experiment.mesh,
        experiment.compute,
        experiment.objective,
        state.reference_model,
    )
