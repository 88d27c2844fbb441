"""Generates text with a trained model."""

from lmlib.generate.generator import Generator, generate, usual_dtype
from lmlib.generate.sampling import GREEDY, Sampling
from lmlib.generate.stream import Generated, New, Stream

__all__ = [
    "GREEDY",
    "Generated",
    "Generator",
    "New",
    "Sampling",
    "Stream",
    "generate",
    "usual_dtype",
]
