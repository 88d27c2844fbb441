"""What is minimised: a file for each objective, and what they share.

Losses are sums over tokens or pairs, so that any split of a batch adds up to the same.
"""

from lmlib.losses.distillation import Distillation
from lmlib.losses.dpo import DPO
from lmlib.losses.next_token import NextToken, batch_loss
from lmlib.losses.objective import LossSums, Metric, Objective, ReferenceModel

__all__ = [
    "DPO",
    "Distillation",
    "LossSums",
    "Metric",
    "NextToken",
    "Objective",
    "ReferenceModel",
    "batch_loss",
]
