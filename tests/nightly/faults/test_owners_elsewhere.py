"""Owners in other containers and on other machines: without /proc, with a wrong clock, on a caching mount."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPO_ROOT
from tests.nightly.faults.needs import why_no_mount

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(why_no_mount() is not None, reason=str(why_no_mount())),
    pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare"),
]
HOLD = """
import sys, time
from jaxckpt_train.errors import DirectoryLockedError
from jaxckpt_train.run import lock as module
from jaxckpt_train.store.backends.local import LocalBackend

module.HEARTBEAT_S, module.SILENCE_S, module.POLL_S = 0.5, float(sys.argv[2]), 0.05
lock, began_s = module.OwnerLock(LocalBackend(), sys.argv[1]), time.monotonic()
try:
    dead = lock.acquire()
    print("took over" if dead else "owned", f"{time.monotonic() - began_s:.1f}", flush=True)
    for line in sys.stdin:
        lock.check()
        print("still owned", flush=True)
    lock.release()
except DirectoryLockedError:
    print("refused", f"{time.monotonic() - began_s:.1f}", flush=True)
"""
JOB = """
import os, sys
import jax
import numpy as np

directory, process, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
import jaxckpt_train as jct

with jct.StepManager(directory) as manager:
    assert manager.latest in (None, 1), manager.latest  # also before the directory exists
    if manager.latest is not None:
        np.testing.assert_array_equal(manager.restore()["state"]["w"], np.arange(9))
    manager.save((manager.latest or 0) + 1, {"state": {"w": np.arange(9)}})
    manager.wait()
    print("saved", manager.latest, flush=True)
"""
FAKETIME = next((str(each) for each in Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), None)


class Started:
    """A process in its own namespaces, which communicates by lines."""

    def __init__(self, shell: str, script: str, *arguments: str, pids: bool = False) -> None:
        spaces = ["--kill-child", "--pid", "--fork"] if pids else []
        command = ["unshare", *spaces, "--mount", "--uts", "bash", "-c", f'mount --make-rprivate /; {shell} exec "$@"']
        variables = {**os.environ, "PYTHONPATH": str(REPO_ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        self.process = subprocess.Popen(
            [*command, "--", sys.executable, "-u", "-c", script, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables,
        )  # fmt: skip

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self) -> str:
        """Ask the process whether it still owns the run."""
        assert self.process.stdin is not None
        self.process.stdin.write("?\n")
        self.process.stdin.flush()
        return self.line()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


@pytest.fixture
def start() -> Iterator[Any]:
    """Return a function that starts processes, which are killed after the test."""
    started: list[Started] = []

    def begin(*arguments: Any, **more: Any) -> Started:
        started.append(Started(*arguments, **more))
        return started[-1]

    yield begin
    for each in started:
        each.kill()


NO_PROC = "hostname box; umount -l /proc;"
BURN = "for i in $(seq 40); do /bin/true; done;"  # gives the process another number


@pytest.mark.parametrize("first", [NO_PROC, NO_PROC + BURN], ids=["same number", "another number"])
@pytest.mark.parametrize("second", [NO_PROC, "hostname box;", "hostname other; umount -l /proc;"])
def test_ownership_works_without_proc(tmp_path: Path, start: Any, first: str, second: str) -> None:
    owner = start(first, HOLD, str(tmp_path), "4", pids=True)
    assert owner.line().startswith("owned")
    assert start(second, HOLD, str(tmp_path), "4", pids=True).line().startswith("refused")
    assert owner.ask() == "still owned"
    owner.kill()
    what, _, seconds = start(second, HOLD, str(tmp_path), "4", pids=True).line().rpartition(" ")
    assert what == "took over"
    assert float(seconds) >= 4


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@functools.cache
def why_no_sshfs() -> str | None:
    missing = [tool for tool in ("sshfs", "ssh-keygen", "/usr/sbin/sshd") if shutil.which(tool) is None]
    if missing or not os.path.exists("/dev/fuse"):
        return f"needs {missing or '/dev/fuse'}"
    return None if FAKETIME else "needs faketime"


@contextlib.contextmanager
def over_ssh(folder: Path, skews: Sequence[str]) -> Iterator[list[Path]]:
    """Mount one directory of a server on clients with skewed clocks."""
    for kind in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / kind], check=True)
    os.makedirs("/run/sshd", exist_ok=True)
    served, port, mounts = folder / "served", str(free_port()), list[tuple[Path, subprocess.Popen[bytes]]]()
    served.mkdir()
    asked = f"ListenAddress=127.0.0.1 AuthorizedKeysFile={folder}/user.pub StrictModes=no UsePAM=no PermitRootLogin=yes"
    options = [part for each in f"{asked} PidFile={folder}/pid".split() for part in ("-o", each)]
    server = subprocess.Popen(["/usr/sbin/sshd", "-D", "-p", port, "-h", folder / "host", *options])
    try:
        for number, skew in enumerate(skews):
            at = folder / f"client{number}"
            at.mkdir()
            how = f"IdentityFile={folder}/user,StrictHostKeyChecking=no,UserKnownHostsFile=/dev/null"
            command = ["sshfs", "-f", "-p", port, "-o", how, f"root@127.0.0.1:{served}", str(at)]
            variables = {**os.environ, **({"LD_PRELOAD": FAKETIME or "", "FAKETIME": skew} if skew else {})}
            for _ in range(20):  # the server may not listen yet
                mounts.append((at, subprocess.Popen(command, env=variables, stderr=subprocess.DEVNULL)))
                until = time.monotonic() + 10
                while not os.path.ismount(at) and mounts[-1][1].poll() is None and time.monotonic() < until:
                    time.sleep(0.05)
                if os.path.ismount(at):
                    break
            assert os.path.ismount(at)
        yield [folder / f"client{number}" for number in range(len(skews))]
    finally:
        for at, client in mounts:
            subprocess.run(["umount", "-l", at], check=False, stderr=subprocess.DEVNULL)
            client.kill()
            client.wait()
        server.kill()
        server.wait()


@pytest.mark.skipif(why_no_sshfs() is not None, reason=str(why_no_sshfs()))
@pytest.mark.parametrize("skews", [("-10m", ""), ("+10m", ""), ("", "-1d"), ("-400d", "+400d")], ids="_".join)
def test_ownership_works_with_wrong_clock(tmp_path: Path, start: Any, skews: Sequence[str]) -> None:
    with over_ssh(tmp_path, skews) as (one, other):
        (one / "run").mkdir()
        owner = start("hostname one;", HOLD, f"{one}/run", "30")
        assert owner.line().startswith("owned")
        assert start("hostname other;", HOLD, f"{other}/run", "30").line().startswith("refused")
        assert owner.ask() == "still owned"
        owner.kill()
        assert start("hostname other;", HOLD, f"{other}/run", "25").line().startswith("took over")


@pytest.mark.skipif(shutil.which("bindfs") is None or not os.path.exists("/dev/fuse"), reason="needs bindfs")
@pytest.mark.parametrize("kept_s", [0, 15])
@pytest.mark.parametrize("below", ["run", "project/run"])
def test_first_start_on_two_machines_shares_directory(tmp_path: Path, start: Any, kept_s: int, below: str) -> None:
    """The mount of the second machine caches missing names for a while, like an NFS client."""
    caches, hosts = f"negative_timeout={kept_s},entry_timeout={kept_s},attr_timeout={kept_s}", tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost one other\n")
    resolves = f"mount --bind {hosts} /etc/hosts;"
    shells = (f"hostname one; {resolves}", f"hostname other; {resolves} bindfs -o {caches} {tmp_path} {tmp_path};")
    for saved in (1, 2):
        port = str(free_port())
        job = [start(shell, JOB, f"{tmp_path}/{below}", str(n), port) for n, shell in enumerate(shells)]
        assert [each.line() for each in job] == [f"saved {saved}"] * 2
        assert [each.process.wait(60) for each in job] == [0, 0]
