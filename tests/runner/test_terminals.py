"""Nothing that a command writes to a terminal commands it: neither names, nor texts of models."""

from pathlib import Path

import numpy as np
import pytest
from forked_processes import run_forked
from pseudo_terminal import HOSTILE, SHOWN, commands_in, run_on_terminal
from run_on_bytes import write_run_on_bytes

from lmlib.data.stored.metadata import TokenizerIdentity
from lmlib.data.stored.shard_writer import ShardWriter

NAME = HOSTILE.replace("\0", "")  # no name of a file holds one
SHOWN_NAME = SHOWN.replace(r"\x00", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("runner", f"--fdl_config={NAME}", f"--workdir={NAME}"),
        ("runner", f"--{NAME}"),
        ("runner", "--fdl_config=experiments/llama_84m", "--workdir=w", f"--fdl.steps={NAME}"),
        ("runner.generate", f"--from={NAME}", "--tokens=1"),
        ("runner.evaluate", f"--from={NAME}", f"--data={NAME}"),
        ("runner.checkpoint", "list", NAME),
        ("runner.convert", f"--from={NAME}", "--to=w"),
        ("data_tools.inspect", NAME),
        ("data_tools.inspect", f"--{NAME}"),
        ("data_tools.pretokenize", f"--dataset={NAME}", "--tokenizer=bytes", f"--out={NAME}"),
    ],
    ids=lambda arguments: arguments[0] + arguments[1][:8].partition("a")[0],
)
def test_names_in_messages_are_shown(arguments):
    status, sent = run_on_terminal("-m", *arguments)
    assert status == 2, sent
    assert not commands_in(sent)
    assert SHOWN.partition("=")[0] in sent  # which ends the name of a flag


def test_what_is_piped_stays_as_it_is():
    ended = run_forked("-m", "runner.checkpoint", "list", NAME)
    assert NAME.partition("=")[0] in ended.stderr


SUPERVISED = """
import os, sys, time
from pathlib import Path
from runner.command_line.lossy_stream import lossy_standard_streams
from runner.processes.supervisor import Connection, supervise

connection = Connection.inherited()
if connection is None:
    lossy_standard_streams()
    sys.exit(supervise(Path(sys.argv[1]), 30, 300, 600))
connection.tell(0, 1, joined=True)
for byte in sys.argv[2].encode():
    os.write(2, bytes([byte]))
    time.sleep(0.001)  # so that the supervisor reads parts of characters
"""


def test_what_supervised_processes_write_is_shown(tmp_path):
    status, sent = run_on_terminal("-c", SUPERVISED, str(tmp_path), f"é{NAME}")
    assert (status, sent) == (0, f"é{SHOWN_NAME}")
    log = (tmp_path / "logs/process_00000.log").read_bytes().decode()
    assert log.endswith(f"é{NAME}")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return write_run_on_bytes(tmp_path_factory.mktemp("terminals"))[0]


@pytest.mark.slow
def test_texts_of_a_model_are_shown(workdir):
    """Each byte is as likely as another: among 200 are dozens of commands."""
    ids = ",".join(map(str, [256, *HOSTILE.encode()]))
    flags = (f"--from={workdir}", "--temperature=1e6", "--top_p=1", "--samples=2")
    status, sent = run_on_terminal("-m", "runner.generate", *flags, f"--tokens={ids}")
    assert status == 0, sent
    assert not commands_in(sent)
    assert sent.count(SHOWN) == 2  # before each answer
    assert len(commands_in(sent.encode().decode("unicode_escape"))) > 20
    status, sent = run_on_terminal("-m", "runner.generate", *flags[:3], typed=("hé\n", "\x04"))
    assert status == 0, sent
    assert "Ctrl-D all" in sent and not commands_in(sent)


@pytest.mark.slow
def test_tables_of_evaluations_are_shown(workdir, tmp_path):
    file = tmp_path / f"{NAME}.txt"
    file.write_text("hello")
    status, sent = run_on_terminal(
        "-m", "runner.evaluate", f"--from={workdir}", f"--data={file}", "--batch_size=8"
    )
    assert status == 0, sent
    assert f"{SHOWN_NAME}.txt" in sent and not commands_in(sent)


@pytest.mark.slow
def test_samples_of_a_run_are_shown(workdir, tmp_path):
    experiment = tmp_path / "experiment.py"
    experiment.write_text(f"""
import fiddle as fdl
from experiments import llama_84m
from lmlib.data.flat_tokens import FlatTokens
def config():
    cfg = llama_84m.config()
    llama_84m.tiny(cfg)
    cfg.data = fdl.Config(FlatTokens, {str(workdir.parent / "data")!r}, "train", 8, 16)
    cfg.validation, cfg.steps, cfg.samples.prompts = None, 1, ({HOSTILE!r},)
    return cfg
""")
    run = tmp_path / NAME
    status, sent = run_on_terminal("-m", "runner", f"--fdl_config={experiment}", f"--workdir={run}")
    assert status == 0, sent
    assert SHOWN in sent and SHOWN_NAME in sent
    sent = sent.replace("\r\x1b[K", "")  # our own live line
    assert not commands_in(sent)
    assert HOSTILE in (run / "samples/00000001.txt").read_bytes().decode()


@pytest.mark.slow
def test_tokens_of_a_data_set_are_shown(tmp_path: Path):
    writer = ShardWriter(
        tmp_path / "data",
        "train",
        content="conversations",
        vocab_size=258,
        tokenizer=TokenizerIdentity("bytes", None),
        source={NAME: NAME},
    )
    text = f"Hi{HOSTILE}yes".encode()
    mask = np.arange(len(text)) >= text.index(b"yes")
    writer.extend(np.array([*text]), np.array([len(text)]), 0, loss_mask=mask)
    writer.finish()
    batch = ("--batch=0", "--batch_size=1", f"--sequence_length={len(text)}")
    for flags in ((), batch):
        status, sent = run_on_terminal("-m", "data_tools.inspect", str(tmp_path / "data"), *flags)
        assert status == 0, sent
        assert SHOWN in sent
        assert not commands_in(sent)
