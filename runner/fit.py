"""Training, from a Fiddle config to a result: `fit(cfg, workdir)`."""

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fiddle as fdl
import jax
from jax.sharding import NamedSharding

from lmlib import train
from lmlib.activations import saved_activations
from lmlib.checkpoint import Checkpoints
from lmlib.data.prefetch import Prefetch
from lmlib.describe import describe
from lmlib.evaluate import Evaluator
from lmlib.experiment import Experiment
from lmlib.metrics import MetricsLog, read_metrics
from lmlib.parallel.layout import partition
from runner import configs
