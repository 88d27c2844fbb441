"""The process in which chat templates run, within limits of memory and time.

    python -m lmlib.data.chats.server MEGABYTES SECONDS

A template is a program, perhaps a stranger's. Sixty characters can ask for all memory or for hours,
even while they are compiled, in more ways than a list of what is forbidden could name. So the
kernel keeps the limits: it gives this process no more memory, and ends it when one text has used
up its processor time. `ChatRenderer` starts it, asks it over its standard input, and sees how it
ended. It also ends when nobody can ask any more, even in the middle of a text.
"""

import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2

from lmlib.data.chats.protocol import END, OUT_OF_MEMORY, message_of, read_message
from lmlib.data.chats.sandbox import compiled, rendered

_LONGEST_REASON = 500  # characters
_STACK = 256 * 1024  # bytes of the second thread's stack, which count as memory
_BUFFER = 64 * 1024  # bytes of answers; who reads them need not wake for each


def answers(
    question: Mapping[str, Any], chats: Iterable[Mapping[str, Any]]
) -> Iterator[tuple[Any, str]]:
    """Values and texts, see `chat_protocol`."""
    try:
        templates = {name: compiled(source) for name, source in question["sources"].items()}
    except ValueError as error:
        yield _refused(error)
        yield END
        return
    yield END
    now = datetime.fromisoformat(question["now"])
    for chat in chats:
        yield from _written(templates[chat["template"]], question["variables"], chat, now)
        yield END


def _written(
    template: jinja2.Template, variables: Mapping[str, Any], chat: Mapping[str, Any], now: datetime
) -> Iterator[tuple[Any, str]]:
    messages = chat["messages"]

    def text(number: int, prompted: bool) -> tuple[str, list[tuple[int, int]]]:
        known = {"messages": messages[:number], "tools": chat["tools"]}
        return rendered(template, {**variables, **known, "add_generation_prompt": prompted}, now)

    try:
        whole, assistant = text(len(messages), chat["add_generation_prompt"])
        yield {"assistant": assistant}, whole
        for turn in () if assistant else chat["turns"]:
            for number, prompted in ((turn, True), (turn + 1, False)):
                part, _ = text(number, prompted)
                yield ({"length": len(part)}, "") if whole.startswith(part) else ({}, part)
    except MemoryError:
        raise
    except Exception as error:  # a program can fail in any way
        yield _refused(error)


def _refused(error: Exception) -> tuple[Any, str]:
    return {"refused": " ".join(str(error)[:_LONGEST_REASON].split())}, ""


def main() -> None:
    megabytes, seconds = int(sys.argv[1]), float(sys.argv[2])
    # From here on nobody reads what Python says, and a full pipe would hold it up.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    threading.stack_size(_STACK)
    threading.Thread(target=_end_with_caller, daemon=True).start()
    _limit_memory(megabytes << 20)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    read = sys.stdin.buffer.read
    answered = os.fdopen(1, "wb", _BUFFER)
    try:
        while True:
            question, _ = read_message(read)
            chats = [read_message(read)[0] for _ in range(question["chats"])]
            signal.setitimer(signal.ITIMER_PROF, seconds)
            for value, text in answers(question, chats):
                answered.write(message_of(value, text))
                signal.setitimer(signal.ITIMER_PROF, seconds)
            answered.flush()
            signal.setitimer(signal.ITIMER_PROF, 0)
    except EOFError:
        return
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def _end_with_caller() -> None:
    """Ends this process when the other end of its standard input is closed."""
    closed = select.poll()
    closed.register(sys.stdin.fileno(), 0)  # a hang-up is always reported, and questions are not
    closed.poll()
    os._exit(0)


def _limit_memory(most: int) -> None:
    """The kernel's limit of data, which a process can only lower; macOS does not keep it."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


if __name__ == "__main__":
    main()
