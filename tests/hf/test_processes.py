"""Folders read and written by several processes: each byte once, and the same bytes as by one."""

import itertools
import json
from pathlib import Path

import pytest
from folder_contents import files_of
from two_processes import run_two

from lmlib import hf
from lmlib.hf.tensor_files import stored_tensors

GOLDEN = Path(__file__).parent / "golden"

# Reads the folder's weights like a run, then saves them; prints the ranges that it read.
PROCESS = """
import json, sys
import jax, fiddle as fdl, pytest

source, target, address, index = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
jax.distributed.initialize(address, 2, index)
from lmlib import hf
from runner.config import configs
from runner.weights.models import read_weights
from runner.weights.target import LoadTarget

read, begun = [], []

def hear(frame, event, function):
    if getattr(function, "__name__", "") != "readinto":
        return
    file = function.__self__
    if event == "c_call":
        begun.append(file.tell())
    elif event == "c_return":
        read.append((file.name, begun.pop(), file.tell()))

overrides = [f"folder={source}", "mesh.fsdp=2", "mesh.tensor=2"]
run = fdl.build(configs.load("experiments/from_hf", ["tiny"], overrides))
sys.setprofile(hear)
model, _ = read_weights(source, LoadTarget(run.recipe, run.mesh))
sys.setprofile(None)
with pytest.raises(FileExistsError, match="not empty"):
    hf.save(model, source if index else target)  # one of them finds something: neither writes
hf.save(model, target, dtype="float32", file_bytes=9_000)
print(json.dumps([(str(name), first, end) for name, first, end in read]))
"""


@pytest.mark.slow
def test_two_processes_read_each_byte_once_and_write_what_one_writes(tmp_path):
    hf.save(hf.load(GOLDEN / "phi3"), tmp_path / "one", dtype="float32", file_bytes=9_000)
    told = run_two(PROCESS, tmp_path / "one", tmp_path / "two")
    reads = [json.loads(line) for line in told]
    assert all(reads)  # both take part
    spans = sorted(tuple(span) for line in reads for span in line)
    tensors = stored_tensors(tmp_path / "one").values()
    for file in {tensor.file for tensor in tensors}:
        own = [(first, end) for where, first, end in spans if where == str(file)]
        begin = min(tensor.offset for tensor in tensors if tensor.file == file)
        assert own[0][0] == begin and own[-1][1] == file.stat().st_size
        assert all(one[1] == next_[0] for one, next_ in itertools.pairwise(own))
    assert files_of(tmp_path / "two") == files_of(tmp_path / "one")
