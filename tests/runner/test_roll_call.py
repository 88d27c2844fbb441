"""How processes meet before JAX connects them, and what they say of ports that others hold."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from forked_processes import run_forked

from runner.errors import ConfigError
from runner.processes import roll_call as module
from runner.processes.roll_call import roll_call


@pytest.fixture
def address():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def outcomes(address, told, seconds=30.0):
    """What the roll call ends with in each process, told its number and how many there are."""

    def call(process, processes):
        try:
            return roll_call(address, process, processes, seconds)
        except ConfigError as error:
            return error

    with ThreadPoolExecutor(len(told)) as pool:
        return [each.result() for each in [pool.submit(call, *one) for one in told]]


def test_processes_meet_and_the_port_is_free_again(address):
    for _ in range(2):
        assert outcomes(address, [(2, 3), (1, 3), (0, 3)]) == ["", "", ""]
    assert outcomes(address, [(0, 1)]) == [""]


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ([(0, 2), (1, 3)], "--num_processes=3 on process 1 and 2 on process 0"),
        ([(0, 3), (1, 2)], "--num_processes=2 on process 1 and 3 on process 0"),
        ([(0, 3), (1, 3), (1, 3)], "two processes have --process_id=1"),
    ],
)
def test_all_hear_what_is_wrong(address, told, message):
    found = outcomes(address, told)
    assert len(set(found)) == 1 and message in found[0]


def test_process_0_names_who_did_not_come(address):
    found = outcomes(address, [(0, 4), (2, 4)], seconds=1.0)
    assert found[0] == found[1]
    assert "process 0 waited 1 s and processes 1, 3 did not come" in found[0]


def test_without_process_0_the_others_say_so(address):
    (error,) = outcomes(address, [(1, 2)], seconds=0.5)
    assert isinstance(error, ConfigError)
    assert "process 1 could not reach the coordinator within 0.5 s (" in str(error)


def test_strangers_at_the_port_change_nothing(address):
    """They connect, say nothing, or something else, or leave."""
    host, _, port = address.rpartition(":")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(roll_call, address, 0, 2, 30.0)
        while True:
            try:
                silent = socket.create_connection((host, int(port)))
                break
            except OSError:
                continue
        with silent, socket.create_connection((host, int(port))) as other:
            other.sendall(b'GET / HTTP/1.1\r\n\r\n"')
            socket.create_connection((host, int(port))).close()
            assert roll_call(address, 1, 2, 30.0) == ""
            assert first.result() == ""


@pytest.mark.parametrize(
    ("says", "message"), [(b"", "says nothing for 0.5 s"), (b"SSH-2.0-x\r\n", "says b'SSH-2.0-x")]
)
def test_a_port_that_something_else_holds_is_refused(monkeypatch, says, message):
    monkeypatch.setattr(module, "GREETING_SECONDS", 0.5)
    with socket.create_server(("localhost", 0)) as listener:
        address = f"localhost:{listener.getsockname()[1]}"
        taken = []

        def take():
            taken.append(listener.accept()[0])
            taken[0].sendall(says)

        thread = threading.Thread(target=take)
        thread.start()
        first, other = outcomes(address, [(0, 2), (1, 2)])
        thread.join()
        taken[0].close()
    port = address.rpartition(":")[2]
    held = f"process 0 cannot listen at port {port} (Address already in use): give all processes"
    assert held in str(first)
    assert f"something else than process 0 listens at the coordinator's address {address}" in str(
        other
    )
    assert message in str(other)


MANY = 1_024
# Process 0, where the limit of open files is that of many systems.
FIRST = f"""
import resource
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (1_024, hard))
from runner.processes.roll_call import roll_call
print(repr(roll_call("ADDRESS", 0, {MANY}, 120)))
"""
# The others, in 32 processes with 32 threads each.
OTHERS = f"""
import os
from concurrent.futures import ThreadPoolExecutor
from runner.processes.roll_call import roll_call
children = []
for child in range(32):
    if not (number := os.fork()):
        mine = range(max(1, 32 * child), 32 * (child + 1))
        with ThreadPoolExecutor(32) as pool:
            told = set(pool.map(lambda n: roll_call("ADDRESS", n, {MANY}, 120), mine))
        os._exit(told != {{""}})
    children.append(number)
print(sum(os.waitpid(number, 0)[1] for number in children))
"""


@pytest.mark.slow
def test_a_thousand_processes_meet(address):
    codes = [code.replace("ADDRESS", address) for code in (FIRST, OTHERS)]
    with ThreadPoolExecutor(2) as pool:
        first, others = pool.map(lambda code: run_forked("-c", code), codes)
    assert first.stdout.strip() == "''", first.stderr
    assert others.stdout.strip() == "0", others.stderr
