"""Hosts of tests: they reach each other, are other machines to shared memory, and leave nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shardlib.ops.collectives.transport import shm_segment
from tests.helpers.hosts import hosts

PRINT = 'import runpy, sys; print(runpy.run_path(sys.argv[1], run_name="segment")["machine"]())'
LISTEN = """
import socket
server = socket.create_server((socket.gethostname(), 5000))
print("ready", flush=True)
print(server.accept()[0].recv(9).decode())
"""
SEND = 'import socket; socket.create_connection(("{}", 5000)).sendall(b"a message")'


@pytest.mark.ranks
def test_hosts_are_machines():
    with hosts(2) as members:
        first, second = members
        processes = [pid for host in members for pid in (host.holder.pid, host.init)]
        command = [sys.executable, "-c", PRINT, shm_segment.__file__]
        names = [host.run(command).stdout for host in (first, first, second)]
        assert names[0] == names[1] != names[2]

        server = second.start([sys.executable, "-c", LISTEN])
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        sent = first.sent()
        assert first.run([sys.executable, "-c", SEND.format(second.name)]).returncode == 0
        assert server.communicate(timeout=60)[0] == "a message\n"
        assert first.sent() > sent
    assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()]
