"""Sinks that send a run's metrics, samples and settings to trackers; each needs its own package."""

from lmlib.trackers.mlflow_tracker import MLflow
from lmlib.trackers.trackio_tracker import Trackio
from lmlib.trackers.wandb_tracker import WeightsAndBiases

__all__ = ["MLflow", "Trackio", "WeightsAndBiases"]
