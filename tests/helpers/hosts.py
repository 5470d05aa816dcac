"""Hosts on this machine: namespaces with their own network address, host name, processes and shared memory.

with hosts(2) as (first, second):           # skips the test where namespaces are not permitted
    first.run(["ping", "-c1", second.address])

No namespace has a name that could be left behind: each lives as long as a process that dies with this one.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest

_PORT = 29400  # free on every host: nothing else runs there
_TOOLS = ("ip", "nsenter", "setpriv", "tc", "unshare")


@dataclass(frozen=True)
class Host:
    """A host: processes on it see only each other, and reach other hosts at their `address` and by `name`."""

    name: str
    address: str
    holder: subprocess.Popen[str]

    @property
    def init(self) -> int:
        """The id of the host's first process, outside of the host; the holder's own, if there is none."""
        pid = self.holder.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else pid

    def start(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Starts a command on the host; `env` is added to this process's environment. Its output is one text."""
        network = {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}
        return subprocess.Popen(
            ["nsenter", "-t", str(self.init), "-a", f"--wd={Path.cwd()}", *command],
            env={**os.environ, **network, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on the host, and returns its exit code and output."""
        process = self.start(command, env)
        output, _ = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(command, process.returncode, output)

    def sent(self) -> int:
        """The bytes that have left the host, headers included."""
        (link,) = json.loads(self._configure("ip", "-j", "-s", "link", "show", "eth0"))
        return int(link["stats64"]["tx"]["bytes"])

    def limit(self, rate: float) -> None:
        """Limits what leaves the host to `rate` bytes/s."""
        shape = f"tbf rate {round(8 * rate)}bit burst 256kb limit 64mb"
        self._configure("tc", "qdisc", "replace", "dev", "eth0", "root", *shape.split())

    def kill(self) -> None:
        """Ends all processes of the host at once, and its network with them."""
        if self.holder.poll() is None:
            os.kill(self.init, signal.SIGKILL)
            self.holder.wait()

    def _configure(self, *command: str) -> str:
        """Runs a command in the host's network, with this process's rights."""
        return _run(["nsenter", "-t", str(self.init), "-n", *command])


@contextmanager
def hosts(n: int) -> Iterator[list[Host]]:
    """`n` hosts on one switch; they end with the block. Skips the test, with the reason, where they cannot be made."""
    with ExitStack() as stack:
        table = stack.enter_context(NamedTemporaryFile("w", suffix=".hosts"))
        table.write("127.0.0.1 localhost\n" + "".join(f"10.0.0.{i + 1} host{i}\n" for i in range(n)))
        table.flush()
        switch = _open("switch", "", table.name, stack)
        switch._configure("ip", "link", "add", "br0", "type", "bridge")
        switch._configure("ip", "link", "set", "br0", "up")
        members = [_open(f"host{i}", f"10.0.0.{i + 1}", table.name, stack) for i in range(n)]
        for host in members:
            wire = f"eth0 type veth peer name {host.name} netns {switch.init}"
            host._configure("ip", "link", "add", *wire.split())
            host._configure("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                host._configure("ip", "link", "set", link, "up")
            switch._configure("ip", "link", "set", host.name, "master", "br0", "up")
        yield members


def torchrun(
    members: Sequence[Host], ranks: int, script: Sequence[str], options: Sequence[str] = (), **env: str
) -> list[subprocess.Popen[str]]:
    """Starts `script` by torchrun with `ranks` processes on each host; they meet at the first host."""
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={members[0].address}:{_PORT}"]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *meeting]
    command += options or [f"--nnodes={len(members)}"]
    return [host.start([*command, f"--local-addr={host.address}", *script], env) for host in members]


def _open(name: str, address: str, table: str, stack: ExitStack) -> Host:
    """Starts the first process of a host, whose mounts include `table`, the names of all hosts."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"hosts need {', '.join(missing)}, which this machine lacks (util-linux, iproute2)")
    own = ["--net", "--pid", "--uts", "--ipc", "--mount", "--mount-proc", "--fork", "--kill-child"]
    script = f"hostname {name} && mount --bind {table} /etc/hosts && echo ready && exec sleep infinity"
    holder = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "unshare", *own, "sh", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    host = Host(name, address, holder)
    stack.enter_context(holder)
    stack.callback(host.kill)
    assert holder.stdout is not None
    if (line := holder.stdout.readline().strip()) != "ready":
        pytest.skip(f"hosts need namespaces, which are not permitted here: {line}")
    return host


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"hosts need a network of their own: {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
