"""Plots of runs: a self-contained HTML page, and PNG and SVG files for papers. Needs no JAX."""

from lmlib.report.page import page, try_write_page, write_page
from lmlib.report.pictures import write_pictures
from lmlib.report.seen import Seen, seen

__all__ = ["Seen", "page", "seen", "try_write_page", "write_page", "write_pictures"]
