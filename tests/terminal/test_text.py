"""Control sequences are shown on terminals, and go into files and pipes unchanged."""

import io

import pytest
from forked_processes import run_forked
from hypothesis import given
from hypothesis import strategies as st
from pseudo_terminal import HOSTILE, SHOWN, commands_in, run_on_terminal

from lmlib.terminal.text import TerminalText, shown


@given(st.text(st.one_of(st.characters(), st.sampled_from(sorted(commands_in(HOSTILE))))))
def test_commands_are_shown_and_all_else_stays(text):
    assert not commands_in(shown(text))
    if not commands_in(text):
        assert shown(text) == text


def test_every_command_is_shown_as_python_writes_it():
    every = [chr(each) for each in range(0x110000) if chr(each) != "\n"]
    lines = dict(zip(every, shown("\n".join(every)).split("\n"), strict=True))
    found = commands_in("".join(every))
    assert len(found) == 65 - 2 + 9
    assert {each for each, line in lines.items() if line != each} == found
    assert all(lines[each] == ascii(each)[1:-1] for each in found)
    assert shown(HOSTILE) == SHOWN


@pytest.mark.parametrize("redraws", [True, False])
def test_a_sequence_is_shown_wherever_it_is_cut(redraws):
    file = io.BytesIO()
    stream = TerminalText(file, "utf-8", redraws)
    assert sum(stream.write(each) for each in f"one {HOSTILE}") == 4 + len(HOSTILE)
    stream.write(f"\n{HOSTILE}\n")
    stream.flush()
    # A write to stderr may begin with a carriage return, for progress bars.
    cut = SHOWN.replace(r"\r", "\r") if redraws else SHOWN
    assert file.getvalue().decode() == f"one {cut}\n{SHOWN}\n"


TALKS = f"""
import logging, sys, traceback, warnings
from absl import logging as absl_logging
from runner.command_line.command import run
hostile = {HOSTILE!r}

def main(arguments):
    print(hostile)
    print(hostile, file=sys.stderr)
    absl_logging.warning(hostile)
    logging.getLogger("other").warning(hostile)
    warnings.warn(hostile)
    if arguments:
        from runner.command_line.lossy_stream import lossy_standard_streams
        lossy_standard_streams()
        print(hostile)
        print(hostile, file=sys.stderr)
        print("é😀", end="")  # without a newline
    raise ValueError(hostile)

run(main)
"""


@pytest.mark.parametrize("more", [(), ("lossy",)])
def test_all_output_of_a_command_is_escaped_on_a_terminal(more):
    status, sent = run_on_terminal("-c", TALKS, *more)
    assert status == 1
    assert not commands_in(sent), sent
    assert sent.count(SHOWN) >= 6 + 2 * len(more)
    assert ("é😀" in sent) == bool(more)


def test_files_and_pipes_get_text_as_it_is():
    ended = run_forked("-c", TALKS, "lossy")
    as_read = HOSTILE.replace("\r", "\n")  # by a text file
    assert ended.stdout.count(as_read) == 2
    assert ended.stderr.count(as_read) >= 6


BARS = """
import sys
from tqdm import tqdm
from lmlib.terminal.text import guard_terminals
from runner.monitoring.progress import Progress
from runner.monitoring.progress_line import ProgressLine

guard_terminals()
for _ in tqdm(range(2), desc="files"):
    for _ in tqdm(range(2), desc="\\x1b]52;c;aGk="):
        pass
with Progress(steps=1, stream=sys.stderr) as progress:
    progress.update(1, loss=1.0, seconds=1.0, tokens_per_second=1.0)
    progress.message("\\x1b]52;c;aGk=")
with ProgressLine() as tell:
    tell("compiling \\x1b]52;c;aGk=")
"""


def test_lines_are_redrawn_in_place():
    status, sent = run_on_terminal("-c", BARS)
    assert status == 0, sent
    for redraw in ("\rfiles", "\x1b[A", "\r\x1b[K[====================] step 1/1", "\r\x1b[K["):
        assert redraw in sent
    assert r"compiling \x1b]52" in sent
    assert "\x1b]" not in sent
