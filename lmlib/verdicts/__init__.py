"""Verdicts on finished runs: which setting is better, by how much, and with what certainty."""

from lmlib.verdicts.comparison import Comparison, Row, Verdict, compare
from lmlib.verdicts.scaling_law import ScalingLaw, fit_scaling_law

__all__ = ["Comparison", "Row", "ScalingLaw", "Verdict", "compare", "fit_scaling_law"]
