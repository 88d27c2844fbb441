"""The processes of a run meet at the coordinator's address before JAX is asked to connect them.

Process 0 listens there, hears the number of each other process and how many it expects, and tells
all of them whether that fits. JAX, which listens there next, would wait for minutes, go on with
processes that disagree, or crash where something else holds the port.
"""

import asyncio
import json
import os
import resource
import socket

from runner.errors import ConfigError
from runner.processes.endings import listed

_GREETING = b"lmlib roll call\n"
GREETING_SECONDS = 10.0  # that process 0 may take to greet a process
_RETRY_SECONDS = 0.2
_ANSWER_SECONDS = 10.0  # that process 0 may take beyond its limit
_OTHER_FILES = 4_096  # open at once at most, not counting a connection to each process


def roll_call(coordinator: str, process: int, processes: int, seconds: float) -> str:
    """Meets the others; returns a mistake that was found, empty if there is none.

    All processes that came return the same.

    Args:
      coordinator: host:port of process 0.
      process: the number of this process.
      processes: the number of processes that it expects.
      seconds: the limit of the wait for all of them.

    Raises:
      ConfigError: if process 0 cannot listen, or this process does not reach it.
    """
    host, _, port = coordinator.rpartition(":")
    if process == 0:
        return asyncio.run(_call(coordinator, int(port), processes, seconds))
    return asyncio.run(_answer(host.strip("[]"), int(port), process, processes, seconds))


async def _call(coordinator: str, port: int, processes: int, seconds: float) -> str:
    """The roll call of process 0."""
    # Each process has a connection to process 0, here and with JAX. Many systems begin with a limit
    # of 1,024 open files.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = processes + _OTHER_FILES
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    came: dict[int, asyncio.StreamReader] = {}
    waiting: list[asyncio.StreamWriter] = []
    found: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(_GREETING)
        try:
            said = json.loads(await reader.readline())
            process, expected = int(said["process"]), int(said["processes"])
            if not 0 < process < max(expected, processes):
                raise ValueError
        except (OSError, ValueError, TypeError, KeyError):  # not a process of this run
            writer.close()
            return
        twice = process in came and not came[process].at_eof()
        came[process] = reader
        waiting.append(writer)
        if found.done():
            return
        if expected != processes:
            found.set_result(
                f"--num_processes={expected} on process {process} and {processes} on process 0: "
                "give all the same"
            )
        elif twice:
            found.set_result(f"two processes have --process_id={process}: give each its own")
        elif len(came) == processes - 1:
            found.set_result("")

    try:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        listening = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise ConfigError(
            f"--coordinator={coordinator}: process 0 cannot listen at port {port} "
            f"({os.strerror(error.errno or 0)}): give all processes a port that is free on its "
            "machine"
        ) from error
    server = await asyncio.start_server(hear, sock=listening, backlog=processes)
    try:
        mistake = "" if processes == 1 else await asyncio.wait_for(found, seconds)
    except TimeoutError:
        missing = sorted(set(range(1, processes)) - set(came))
        mistake = (
            f"process 0 waited {seconds:g} s and {listed(missing)} did not come: see that each "
            "runs, and that all have the same --coordinator and --num_processes; or raise "
            "--startup_seconds"
        )
    server.close()  # before the answer: then JAX listens here
    for writer in waiting:
        writer.write(json.dumps({"mistake": mistake}).encode() + b"\n")
        writer.close()
    closed = (writer.wait_closed() for writer in waiting)
    await asyncio.gather(*closed, return_exceptions=True)
    return mistake


async def _answer(host: str, port: int, process: int, processes: int, seconds: float) -> str:
    """The roll call of the others."""
    last_try = "it did not answer"
    now = asyncio.get_running_loop().time
    said = json.dumps({"process": process, "processes": processes}).encode() + b"\n"
    try:
        async with asyncio.timeout(seconds) as limit:
            while True:
                try:
                    reader, writer = await asyncio.open_connection(host, port)
                    try:
                        await _check_greeting(reader, f"{host}:{port}")
                        limit.reschedule(now() + seconds + _ANSWER_SECONDS)
                        writer.write(said)
                        last_try = "it waits for others"
                        answer = await reader.readline()
                    finally:
                        writer.close()
                    if answer:
                        return str(json.loads(answer)["mistake"])
                    last_try = "it ended"
                except OSError as error:  # it may not run yet
                    last_try = error.strerror or str(error)
                await asyncio.sleep(_RETRY_SECONDS)
    except TimeoutError:
        raise ConfigError(
            f"process {process} could not reach the coordinator within {seconds:g} s ({last_try}): "
            f"see that process 0 runs, that it listens at {host}:{port} and that this machine may "
            "connect to it; or raise --startup_seconds"
        ) from None


async def _check_greeting(reader: asyncio.StreamReader, address: str) -> None:
    """Raises ConfigError if another program listens, OSError if process 0 went away."""
    try:
        async with asyncio.timeout(GREETING_SECONDS):
            said = await reader.read(len(_GREETING))
    except TimeoutError:
        found = f"says nothing for {GREETING_SECONDS:g} s"
    else:
        if not said:
            raise ConnectionResetError("it closed the connection")
        if said == _GREETING:
            return
        found = f"says {said!r}"
    raise ConfigError(
        f"something else than process 0 listens at the coordinator's address {address} and "
        f"{found}: give all processes a port that is free on the machine of process 0"
    )
