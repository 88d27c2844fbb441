"""What a pipeline leaves undone while it fills and drains."""

from lmlib.experiment import Experiment
from lmlib.models.pipeline.schedule import schedule_of


def bubble(experiment: Experiment) -> tuple[str, ...]:
    """A remark on the schedule of the run's stages; none where there is one stage."""
    mesh, compute = experiment.mesh, experiment.compute
    rows = experiment.data.batch_size // experiment.microbatches
    schedule = schedule_of(rows, compute, mesh)
    if schedule.stages == 1:
        return ()
    around = f", {schedule.rounds} rounds" if schedule.rounds > 1 else ""
    return (
        f"{schedule.stages} stages, {schedule.microbatches} microbatches of "
        f"{compute.pipeline_rows} rows of each device{around}: for {schedule.bubble:.1%} of the "
        "layers' time a stage has nothing to do (the bubble; more microbatches, or a larger "
        "--fdl.compute.pipeline_rounds, lessen it)",
    )
