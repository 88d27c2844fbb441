"""Plots of runs: a self-contained HTML page, and PNG and SVG files for papers. Needs no JAX."""

from lmlib.report.page import leave_page, page, write_page
from lmlib.report.pictures import write_pictures
from lmlib.report.seen import Seen, seen

__all__ = ["Seen", "leave_page", "page", "seen", "write_page", "write_pictures"]
