"""Builds the API reference from the docstrings: one HTML page for each public module.

    python docs/api_reference.py FOLDER

Warnings of pdoc are errors: a name of `__all__` that does not resolve, or an annotation that cannot
be read.
"""

import importlib
import sys
import warnings
from pathlib import Path

import pdoc

PUBLIC = (  # a package with `__all__` has one page; other packages have one for each module
    "lmlib",
    "lmlib.adapters",
    "lmlib.checkpoint",
    "lmlib.compute",
    "lmlib.data",
    "lmlib.evaluate",
    "lmlib.experiment",
    "lmlib.generate",
    "lmlib.guard",
    "lmlib.hf",
    "lmlib.inspect",
    "lmlib.losses",
    "lmlib.models",
    "lmlib.optim",
    "lmlib.parallel",
    "lmlib.plan.planner",
    "lmlib.profile",
    "lmlib.recipe",
    "lmlib.state",
    "lmlib.train",
    "runner",
)

if len(sys.argv) != 2:
    sys.exit("usage: python docs/api_reference.py FOLDER")

for name in pdoc.extract.walk_specs(PUBLIC):
    module = importlib.import_module(name)
    for member in getattr(module, "__all__", ()):
        setattr(module, member, getattr(module, member))  # some are imported on first use
for record in tuple.__subclasses__():  # the docstrings of NamedTuples describe the fields
    for field in getattr(record, "_fields", ()):
        getattr(record, field).__doc__ = ""
        record.__new__.__doc__ = ""

warnings.filterwarnings("error", module=r"pdoc\.")
# The type alias behind optax.OptState exists only in optax's own module.
warnings.filterwarnings("ignore", r"Error parsing type annotation .*'ArrayTree'")
pdoc.render.configure(docformat="google", footer_text="lmlib")
pdoc.pdoc(*PUBLIC, output_directory=Path(sys.argv[1]))
