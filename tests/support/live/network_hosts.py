"""Two hosts of one machine: network namespaces with addresses of their own, joined by a link that can be cut.

Each host is held by a process, which dies with the test run; the kernel then takes away its namespace and its links.
This test run reaches both hosts by links of its own, so a cut between them does not cut its clients off.
"""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from live.process import Process, wait_until

NUM_HOSTS = 2


class NetworkHost:
    """A network namespace, and how programs are started in it."""

    def __init__(self, number: int, prefix: int, directory: Path) -> None:
        self.ipv4 = f"10.213.{prefix}.{number + 1}"
        self.ipv6 = f"fd13:{prefix:x}::{number + 1}"
        command = ["/usr/bin/unshare", "--net", "/bin/sleep", "infinity"]
        self._holder = Process(f"host{number}", command, directory / "hosts.log", directory)

    @property
    def pid(self) -> int:
        """The process that holds the namespace."""
        return self._holder.pid

    def start(self) -> None:
        own = os.readlink("/proc/self/ns/net")
        self._holder.start()
        wait_until(lambda: self._namespace() not in ("", own), 10, "the namespace does not come")
        ip(self, "link", "set", "lo", "up")

    def _namespace(self) -> str:
        try:
            return os.readlink(f"/proc/{self.pid}/ns/net")
        except OSError:
            return ""

    def command(self, words: Sequence[str]) -> list[str]:
        """The command line that runs a program on this host."""
        return ["/usr/bin/nsenter", f"--net=/proc/{self.pid}/ns/net", "--", *words]

    def stop(self) -> None:
        self._holder.stop(0)


class NetworkHosts:
    """Two hosts, and the links between them and to this test run."""

    def __init__(self, directory: Path) -> None:
        prefix = os.getpid() % 250 + 1
        self.hosts = [NetworkHost(number, prefix, directory) for number in range(NUM_HOSTS)]
        self._prefix = prefix

    def start(self) -> None:
        for host in self.hosts:
            host.start()
        first, second = self.hosts
        run(f"ip link add name wire netns {first.pid} type veth peer name wire netns {second.pid}")
        for number, (host, other) in enumerate(((first, second), (second, first))):
            near, far = f"oct{self._prefix}h{number}", "outside"
            run(f"ip link add name {near} type veth peer name {far} netns {host.pid}")
            run(f"ip link set {near} up")
            for device in ("wire", far):
                ip(host, f"link set {device} up")
            for own, others, mine, size in (
                (host.ipv4, other.ipv4, f"10.213.{self._prefix}.{101 + number}", "/32"),
                # One of version 6 is used at once, without asking whether another host has it.
                (host.ipv6, other.ipv6, f"fd13:{self._prefix:x}::{101 + number}", "/128 nodad"),
            ):
                length, *no_wait = size.split()
                for device in ("wire", far):
                    ip(host, f"address add {own}{length} dev {device}", *no_wait)
                ip(host, f"route add {others} dev wire")
                ip(host, f"route add {mine} dev {far}")
                run(f"ip address add {mine}{length} dev {near}", *no_wait)
                run(f"ip route add {own} dev {near} src {mine}")

    def cut(self) -> None:
        """From now on what one host sends to the other vanishes, without an answer."""
        self._route("blackhole {}")
        assert not self.joined()

    def heal(self) -> None:
        self._route("{} dev wire")
        assert self.joined()

    def _route(self, how: str) -> None:
        for host, other in zip(self.hosts, reversed(self.hosts), strict=True):
            for address in (other.ipv4, other.ipv6):
                ip(host, f"route replace {how.format(address)}")

    def joined(self) -> bool:
        """Whether a packet from the first host may leave for the second one."""
        first, second = self.hosts
        asked = subprocess.run(first.command(["ip", "route", "get", second.ipv4]), capture_output=True, check=False)
        return asked.returncode == 0 and b"dev wire" in asked.stdout

    def stop(self) -> None:
        for host in self.hosts:
            host.stop()


def ip(host: NetworkHost, *words: str) -> None:
    run(*host.command(["ip", *(["-6"] if any("::" in word for word in words) else []), *words]))


def run(*words: str) -> None:
    """A command, of words or lines."""
    words = tuple(" ".join(words).split())
    if words[0] == "ip" and any("::" in word for word in words):
        words = ("ip", "-6", *words[1:])
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


def why_none() -> str:
    """Why this process cannot have hosts; empty if it can."""
    if os.geteuid():
        return "needs root, for network namespaces"
    command = ["unshare", "--net", "ip", "link", "add", "name", "tried", "type", "veth"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"no network namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


@contextmanager
def network_hosts(directory: Path) -> Iterator[NetworkHosts]:
    hosts = NetworkHosts(directory)
    try:
        hosts.start()
        yield hosts
    finally:
        hosts.stop()
