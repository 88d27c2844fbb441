"""The library stays small enough to read. Bounds go down, unless a change states why they grow.

The core trains a dense model. A researcher who changes the architecture has to know the files that
it imports.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = """
import lmlib.train
from lmlib.data.flat_tokens import FlatTokens
from lmlib.losses.next_token import NextToken
from lmlib.models.families.llama import llama
from lmlib.optim.adamw import adamw
from lmlib.parallel.mesh import make_mesh
"""
COUNT = """
import pathlib, sys
root = pathlib.Path(sys.argv[1])
files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
ours = {file for file in files if file and root in pathlib.Path(file).parents}
print(len(ours), sum(len(open(file).readlines()) for file in ours))
"""
LARGEST = {  # files, lines
    "core": (CORE, 58, 7_107),
    "fit": ("import runner.training.fit\n", 165, 19_918),
}
# Extras: folders and modules that the core does not import.
EXTRAS = (
    "lmlib.adapters",
    "lmlib.checkpoint",
    "lmlib.data.stored.bucket_array",
    "lmlib.data.stored.seqax",
    "lmlib.data.stored.teacher",
    "lmlib.data.whole_documents",
    "lmlib.evaluate",
    "lmlib.experiment",
    "lmlib.generate",
    "lmlib.gguf",
    "lmlib.hf",
    "lmlib.inspect",
    "lmlib.models.attend.context_parallel",
    "lmlib.models.attend.fused",
    "lmlib.models.experts",
    "lmlib.models.pipeline",
    "lmlib.plan",
    "lmlib.profile",
    "lmlib.report",
    "lmlib.runs",
    "lmlib.serve",
    "lmlib.storage.bucket",
    "lmlib.trackers",
    "lmlib.verdicts",
)
# Pages, terminal and Python surfaces have 1,170 of these lines, and 850 of the tests' lines. Hybrid
# models, multi-token prediction and speculative decoding have 5,060, and 2,780 of the tests' lines.
# Experts on GPUs, eight bits and plan's errors have 800, and 430 of the tests' lines. AdEMAMix,
# schedule-free learning, tail averages, states in 8 bits and QK-clip have 730, and 500 of the
# tests' lines.
# Shampoo, SOAP-Muon, Dion and the table of all optimizers have 390, and 490 of the tests' lines.
# Attention with convolutions has 156, and 176 of the tests' lines; the core has 12 of them, which
# let attention's products, norms and mixing be called one by one.
# Losses of preferences have 980, and 600 of the tests' lines; the core has 55 of them, which read
# labelled answers and let a loss of a microbatch depend on its whole batch.
# nanochat and the record have 2,050, and 980 of the tests' lines.
# Bases in 4 bits have 1,040, and 470 of the tests' lines.
# GGUF files and folders for serving have 1,380, and 920 of the tests' lines.
# Serving has 1,100; its command and HTTP have 1,230, and 1,110 of the tests' lines.
MOST_LINES, MOST_LINES_OF_TESTS = 81_072, 55_403


def in_a_new_process(code):
    command = [sys.executable, "-c", code, str(ROOT)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return found.stdout


@pytest.mark.parametrize("name", [pytest.param("fit", marks=pytest.mark.landing), "core"])
def test_an_import_brings_no_more_than_its_bound(name):
    code, most_files, most_lines = LARGEST[name]
    files, lines = map(int, in_a_new_process(code + COUNT).split())
    assert files > 30, "or this test counts nothing"
    assert files <= most_files, f"{files} files are imported, and {most_files} may be"
    assert lines <= most_lines, f"{lines:,} lines are imported, and {most_lines:,} may be"


def test_the_core_imports_no_extra():
    imported = in_a_new_process(CORE + "import sys; print(*sys.modules)").split()
    assert "lmlib.models.stack" in imported
    assert not [each for each in imported if each.startswith(EXTRAS)]


def test_the_library_and_its_tests_have_no_more_lines_than_their_bounds():
    def lines_of(*folders):
        files = (file for folder in folders for file in (ROOT / folder).rglob("*.py"))
        return sum(len(file.read_bytes().splitlines()) for file in files)

    library = "benchmarks", "clusters", "data_tools", "docs", "experiments", "lmlib", "runner"
    assert 10_000 < lines_of(*library, "notebooks") <= MOST_LINES
    assert 10_000 < lines_of("tests") <= MOST_LINES_OF_TESTS
