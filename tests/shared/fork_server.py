"""A Python with all imports of commands, which forks for each request of `forked_processes`."""

import contextlib
import gc
import importlib
import json
import os
import runpy
import socket
import sys
import threading
import time
from types import ModuleType
from typing import Any

# None that defines flags of its own, since the command defines them.
IMPORTED = (
    "jax",  # first: it sets how much its library logs
    "fiddle.absl_flags",
    "jaxlib.mlir.dialects.mhlo",
    "data_tools.command_line",
    "data_tools.convert.to_lmlib",
    "data_tools.inspect.showing",
    "data_tools.prepare_chats.prepare",
    "data_tools.pretokenize.report",
    "data_tools.pretokenize.texts",
    "data_tools.shared_flags",
    "data_tools.train_tokenizer.byte_level_bpe",
    "experiments.llama_84m",
    "experiments.quickstart",
    "lmlib.data.synthetic",
    "lmlib.hf",
    "lmlib.plan.search",
    "runner.inference.loaded",
    "runner.jax_settings.devices",
    "runner.processes.joining",
    "runner.training.fit",
)


def import_all() -> dict[str, str]:
    """Imports the modules of commands; returns the environment variables that this has set."""
    before = set(os.environ.items())
    for name in IMPORTED:
        importlib.import_module(name)
    return dict(set(os.environ.items()) - before)


def serve(connection: socket.socket, set_by_imports: dict[str, str]) -> list[str]:
    """Returns in each requested process, with its arguments; exits when the connection closes.

    A request is a line of JSON with the descriptors of stdin, stdout, stderr and of a pipe, which
    gets the process id, and later the exit status.
    """
    while True:
        request, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 4)
        while request and not request.endswith(b"\n"):
            request += connection.recv(1 << 16)
        _forget_the_ended()
        if not request:
            sys.exit()
        if os.fork():
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        connection.close()
        *streams, pipe = descriptors
        process = os.fork()
        if process:
            _wait_for(process, pipe, streams)
        os.close(pipe)
        request = json.loads(request)
        request["environment"] = set_by_imports | request["environment"]
        return _begin(request, streams)


def _forget_the_ended() -> None:
    """Their processor time is charged to this process, and so to the tests."""
    with contextlib.suppress(ChildProcessError):  # there are none
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _wait_for(process: int, pipe: int, streams: list[int]) -> None:
    for stream in (*streams, 0, 1, 2):
        os.close(stream)
    os.write(pipe, b"%d\n" % process)
    # Its number is free for others only once its end has been told.
    ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    assert ended
    exited = ended.si_code == os.CLD_EXITED
    os.write(pipe, b"%d\n" % (ended.si_status if exited else -ended.si_status))
    os.waitpid(process, 0)
    os._exit(0)


def _begin(request: dict[str, Any], streams: list[int]) -> list[str]:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in added if folder and folder not in sys.path]
    sys.modules["runner"].IMPORTED_AT = time.time()
    return request["arguments"]


def run(arguments: list[str]) -> None:
    """Runs `python ARGUMENTS`: -m MODULE, -c CODE or FILE, with its own arguments."""
    sys.orig_argv = [sys.executable, *arguments]
    what, *rest = arguments
    if what == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif what == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.realpath(what))
        runpy.run_path(what, run_name="__main__")


if __name__ == "__main__":
    set_by_imports = import_all()
    assert threading.active_count() == 1, "a thread is not there after a fork"
    gc.collect()
    gc.freeze()  # the memory pages of imported modules stay shared
    run(serve(socket.socket(fileno=int(sys.argv[1])), set_by_imports))
