"""The dtype that a model is computed in where nobody says."""

from lmlib.parallel.collectives import platform


def usual_dtype() -> str:
    """In which this machine computes one token after the other fast: bfloat16, but float32 on CPUs,
    which would convert every weight each time."""
    return "float32" if platform() == "cpu" else "bfloat16"
