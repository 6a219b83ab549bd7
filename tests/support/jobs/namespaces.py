"""Network namespaces that stand for hosts: each has an address of its own on a common bridge. Needs root."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

SUBNET = "10.77.0"
_CLONE_NEWNET = 0x40000000
_NUMBERS = itertools.count()


def why_not() -> str | None:
    """Return why there can be no namespaces here, or None."""
    if os.geteuid() or shutil.which("ip") is None:
        return "needs root and the command ip"
    probe = subprocess.run(["ip", "netns", "add", "jct-probe"], capture_output=True, text=True, check=False)
    if probe.returncode:
        return f"no network namespaces here: {probe.stderr.strip()}"
    _ip("netns", "del", "jct-probe")
    return None


@contextlib.contextmanager
def network(hosts: int) -> Iterator[list[str]]:
    """Make connected namespaces, and yield their names; `address(number)` is that of each."""
    # A name is never used twice: the kernel removes the links of a namespace some time after it.
    tag = f"{os.getpid() % 100_000}n{next(_NUMBERS) % 100}"
    bridge, names = f"jctb{tag}", [f"jct{tag}h{number}" for number in range(hosts)]
    with contextlib.ExitStack() as made:
        _ip("link", "add", bridge, "type", "bridge")
        made.callback(_ip, "link", "del", bridge)
        _ip("link", "set", bridge, "up")
        for number, name in enumerate(names):
            _ip("netns", "add", name)
            made.callback(_ip, "netns", "del", name)
            _ip("link", "add", f"{name}o", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", f"{name}o", "master", bridge, "up")
            _ip("-n", name, "addr", "add", f"{address(number)}/24", "dev", "eth0")
            for link in ("eth0", "lo"):
                _ip("-n", name, "link", "set", link, "up")
        yield names


def address(number: int) -> str:
    """Return the address of a host."""
    return f"{SUBNET}.{number + 1}"


def set_link(name: str, *, up: bool) -> None:
    """Connect a host to the network, or disconnect it."""
    _ip("link", "set", f"{name}o", "up" if up else "down")


def enter(name: str) -> None:
    """Move this thread, and all that it starts from now on, to a namespace."""
    with Path(f"/run/netns/{name}").open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {name}")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
