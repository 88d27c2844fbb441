"""Verdicts on finished runs: which setting is better, by how much, and with what certainty."""

from lmlib.verdicts.comparison import Comparison, Judged, Row, compare
from lmlib.verdicts.scaling_law import ScalingLaw, fit_scaling_law

__all__ = ["Comparison", "Judged", "Row", "ScalingLaw", "compare", "fit_scaling_law"]
