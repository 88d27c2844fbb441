"""Small faults, of the kinds that others shipped, by what they are in."""

from faults_of_code import (
    of_data,
    of_models,
    of_runs,
    of_saved_models,
    of_training,
    of_verdicts,
)
from faults_of_code.mutation import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    *of_models.MUTATIONS,
    *of_training.MUTATIONS,
    *of_data.MUTATIONS,
    *of_saved_models.MUTATIONS,
    *of_runs.MUTATIONS,
    *of_verdicts.MUTATIONS,
)
