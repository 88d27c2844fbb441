"""Checks that all processes of a run are present and agree before JAX connects them.

Process 0 listens at the coordinator's address. Every other process sends its number and the number
of processes that it expects, and process 0 replies with an error if they don't match. Without this
check, JAX would wait for minutes, continue with processes that disagree, or crash if another
program uses the port.
"""

import asyncio
import json
import os
import resource
import socket

from runner.errors import ConfigError
from runner.processes.endings import processes_text

_GREETING = b"lmlib roll call\n"
GREETING_SECONDS = 10.0  # time limit for the greeting of process 0
_RETRY_SECONDS = 0.2
_ANSWER_SECONDS = 10.0  # extra wait for the answer, beyond the limit of process 0
_OTHER_FILES = 4_096  # open files to allow, not counting a connection to each process


def roll_call(coordinator: str, process: int, processes: int, seconds: float) -> str:
    """Checks that all processes of the run are present and agree.

    Args:
      coordinator: host:port of process 0.
      process: the number of this process.
      processes: the number of processes that it expects.
      seconds: how long to wait for all of them.

    Returns:
      An error message, the same on all processes that connected; empty if all is well.

    Raises:
      ConfigError: if process 0 cannot listen, or this process cannot reach it.
    """
    host, _, port = coordinator.rpartition(":")
    if process == 0:
        return asyncio.run(_call(coordinator, int(port), processes, seconds))
    return asyncio.run(_answer(host.strip("[]"), int(port), process, processes, seconds))


async def _call(coordinator: str, port: int, processes: int, seconds: float) -> str:
    """Runs the roll call on process 0."""
    # Process 0 has a connection to each process, both here and in JAX. The default limit on many
    # systems is 1,024 open files.
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
            f"process 0 waited {seconds:g} s and {processes_text(missing)} did not come: check "
            "that each runs, and that all have the same --coordinator and "
            "--num_processes; or raise "
            "--startup_seconds"
        )
    server.close()  # before the answer, since JAX then listens at this port
    for writer in waiting:
        writer.write(json.dumps({"mistake": mistake}).encode() + b"\n")
        writer.close()
    closed = (writer.wait_closed() for writer in waiting)
    await asyncio.gather(*closed, return_exceptions=True)
    return mistake


async def _answer(host: str, port: int, process: int, processes: int, seconds: float) -> str:
    """Runs the roll call on the other processes."""
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
                except OSError as error:  # process 0 may not have started yet
                    last_try = error.strerror or str(error)
                await asyncio.sleep(_RETRY_SECONDS)
    except TimeoutError:
        raise ConfigError(
            f"process {process} could not reach the coordinator within {seconds:g} s ({last_try}): "
            f"see that process 0 runs, that it listens at {host}:{port} and that this machine may "
            "connect to it; or raise --startup_seconds"
        ) from None


async def _check_greeting(reader: asyncio.StreamReader, address: str) -> None:
    """Raises ConfigError if another program listens, OSError if the connection closed."""
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
