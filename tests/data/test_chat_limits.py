"""Any chat template gets little memory and time, and nothing else is harmed."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sentinels import sentinels

from lmlib.data.chats.chat import BeyondLimits, ChatTemplate
from lmlib.data.chats.renderer import ChatRenderer

ROOT = Path(__file__).parents[2]
MEMORY, TIME = "80 MB of memory", "0.2 seconds of processor time"
NESTED = "{{% for i in range(99999) %}}{{% for j in range(99999) %}}{}{{% endfor %}}{{% endfor %}}"


def asked(text):
    return [{"role": "user", "content": text}]


def grown(start, step):
    """A template in which x is `start`, and ninety-nine times what `step` makes of it."""
    loop = "{% for i in range(99) %}{% set n.x = " + step + " %}{% endfor %}"
    return "{% set n = namespace(x=" + start + ") %}" + loop + "{{ n.x }}"


@pytest.fixture(scope="module")
def renderer():
    return ChatRenderer(megabytes=80, seconds=0.2)


@pytest.mark.parametrize(
    ("source", "too_much"),
    sentinels(
        [
            ("{{ 'a'.center(999999999) }}", MEMORY),
            ("{{ [1] | tojson(indent=999999999) }}", MEMORY),
            (grown("'aa'", "n.x ~ n.x"), MEMORY),
            (grown("9", "n.x * n.x"), TIME),
            (NESTED.format(""), TIME),
            ("{% set x %}" + NESTED.format("aaaaaaaa") + "{% endset %}", f"{MEMORY}|{TIME}"),
        ],
        lambda case: case[0] != NESTED.format(""),
    ),
)
def test_no_template_takes_much_memory_or_time(renderer, source, too_much):
    template = ChatTemplate({"default": source}, {}, renderer)
    with pytest.raises(BeyondLimits, match=f"takes more than ({too_much}): use another template"):
        template.render(asked("Hi"))


@pytest.mark.parametrize("source", ["{{ 9 ** (9 ** 9) }}", "{{ a }}" * 20_000])
def test_compiling_is_limited_too(renderer, source):
    with pytest.raises(ValueError, match=f"takes more than ({TIME}|{MEMORY}):"):
        ChatTemplate({"default": source}, {}, renderer)


PICKY = "{% if messages[0].content == 'much' %}{{ 'a'.center(999999999) }}{% endif %}"
PICKY += "{% if messages[0].content == 'no' %}{{ raise_exception('never') }}{% endif %}"
PICKY += "{{ messages[0].content }}"


def test_a_template_is_given_up_after_three_conversations_beyond_the_limits(renderer):
    template, found = ChatTemplate({"default": PICKY}, {}, renderer), []
    for text in ("a", "no", "much", "b", "much", "much", "c", "much", "much", "much"):
        try:
            found.append(template.render(asked(text)).text)
        except ValueError as error:
            found.append(type(error).__name__)
    beyond = ["BeyondLimits"] * 3
    assert found == ["a", "ValueError", beyond[0], "b", *beyond[1:], "c", *beyond]
    with pytest.raises(OSError, match="for 3 consecutive conversations: use another template"):
        template.render(asked("a"))


@pytest.fixture
def started():
    """A template of a process of its own with a minute for a text, and its number."""
    before = children()
    source = "{% if messages[0].content == 'much' %}" + NESTED.format("") + "{% endif %}"
    source += "{{ messages[0].content }}"
    template = ChatTemplate({"default": source}, {}, ChatRenderer(seconds=60.0))
    (process,) = children() - before
    yield template, process


def children():
    found = set()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # of another test, and it ended just now
            found |= {int(each) for each in (thread / "children").read_text().split()}
    return found


def test_a_process_that_was_killed_is_started_again(started):
    template, process = started
    os.kill(process, signal.SIGKILL)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    assert template.render(asked("a")).text == "a"


@pytest.mark.landing
def test_a_killed_process_is_reported(started):
    template, process = started
    resource.prlimit(process, resource.RLIMIT_CPU, (1, 1))  # the kernel kills it within a second
    with pytest.raises(
        ChildProcessError, match=r"templates run ended with SIG(KILL|XCPU), perhaps"
    ):
        template.render(asked("much"))
    assert template.render(asked("a")).text == "a"


def test_an_interrupted_question_leaves_no_answer(started):
    template, _ = started

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            template.render(asked("much"))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert template.render(asked("a")).text == "a"


def test_threads_get_their_own_texts(renderer):
    template = ChatTemplate({"default": PICKY}, {}, renderer)
    texts = [str(number) * 50_000 for number in range(30)]
    with ThreadPoolExecutor(3) as threads:
        found = threads.map(lambda text: template.render(asked(text)).text, texts)
        assert list(found) == texts


FORKS = """
import os, sys
from lmlib.data.chats.chat import ChatTemplate
template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
forked = os.fork()
text = ("parent", "child")[not forked] * 10_000
for _ in range(100):
    assert template.render([{"role": "user", "content": text}]).text == text
sys.exit(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) if forked else 0)
"""


def test_a_fork_gets_its_own_texts():
    subprocess.run([sys.executable, "-c", FORKS], cwd=ROOT, check=True)
