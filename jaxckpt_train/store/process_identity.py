"""Facts about processes and this machine: identity, whether another process is alive, memory, Slurm, Kubernetes."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import secrets
import socket
from pathlib import Path

import msgspec

PID_LIMIT = 1 << 31  # every process number is smaller
_nonce: int


class ProcessIdentity(msgspec.Struct, frozen=True):
    """The identity of a process, which is unique across reboots and containers of this machine.

    `start`, `boot` and `namespace` are empty if the system does not report them (no /proc). `nonce` is random and
    identifies this very process on any system; it is empty in records of earlier versions.
    """

    host: str
    pid: int
    start: str
    boot: str = ""
    namespace: str = ""
    nonce: str = ""


def _draw_nonce() -> None:
    """Draw a random number of this process; a forked child draws another one."""
    global _nonce
    _nonce = secrets.randbits(48)


_draw_nonce()
os.register_at_fork(after_in_child=_draw_nonce)


def this_process() -> ProcessIdentity:
    """The identity of the calling process."""
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    boot = _read("/proc/sys/kernel/random/boot_id").strip()
    pid, nonce = os.getpid(), f"{_nonce:012x}"
    return ProcessIdentity(socket.gethostname(), pid, _start_of(pid), boot, namespace, nonce)


def descriptor_path(pid: int, descriptor: int, begins: str) -> str:
    """The /proc path of another process's descriptor, if its target starts with `begins`; else raises OSError."""
    path = f"/proc/{pid}/fd/{descriptor}"
    if not os.readlink(path).startswith(begins):  # checked first, because opening a pipe might block for ever
        raise OSError(errno.ENOENT, "another process has this number here", path)
    return path


def machine_id() -> str:
    """An identifier that all processes of this machine share, even in containers; empty if the system reports none."""
    return this_process().boot


def is_dead(other: ProcessIdentity) -> bool | None:
    """Whether a process has certainly ended (True) or is certainly alive (False); None if that cannot be known here.

    It is known of this very process, and of a process whose machine, boot, PID namespace and start time are known: a
    process number alone may belong to another process, in another container or after a reboot.
    """
    me = this_process()
    if other.nonce and other.nonce == me.nonce:
        return False
    if not (0 < other.pid < PID_LIMIT and other.boot and other.namespace and other.start):
        return None
    if (other.host, other.boot, other.namespace) != (me.host, me.boot, me.namespace):
        return None  # another machine or container, or this machine before a reboot
    try:
        os.kill(other.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it exists and belongs to another user
    if _stat_of(other.pid)[:1] in (["Z"], ["X"]):
        return True  # a zombie, whose parent has not read its exit code
    start = _start_of(other.pid)  # empty where /proc shows users only their own processes
    return start != other.start if start else None


def command_name(pid: int) -> str:
    """The name of a process's program, at most 15 bytes; empty if the system does not report it."""
    return _read(f"/proc/{pid}/comm").strip()


def memory_bytes() -> int:
    """The total memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def process_tag() -> str:
    """This process's identity for file names: `<machine>-<boot>-<pid>-<start>`."""
    me = this_process()
    return f"{_short(me.host + me.namespace)}-{_short(me.boot)}-{me.pid}-{me.start or _nonce}"


def is_dead_tag(tag: str) -> bool:
    """Whether the process with this tag has certainly ended: it ran on this machine, and ended or a reboot ended it."""
    me = this_process()
    machine, boot, pid, start = tag.split("-")
    if not (me.boot and me.namespace) or machine != _short(me.host + me.namespace):
        return False
    if boot != _short(me.boot):
        return True
    return is_dead(ProcessIdentity(me.host, int(pid), start, me.boot, me.namespace)) is True


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _start_of(pid: int) -> str:
    """The start time of a process in clock ticks since boot, which differs if a process number is reused."""
    stat = _stat_of(pid)
    return stat[19] if len(stat) > 19 else ""


def process_age_s() -> float | None:
    """Seconds since this process started; None if the system does not report it."""
    try:
        ticks, up_s = int(_start_of(os.getpid())), float(_read("/proc/uptime").split()[0])
    except (ValueError, IndexError):
        return None
    return max(0.0, up_s - ticks / os.sysconf("SC_CLK_TCK"))


def _stat_of(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the state on; empty if the system does not report them."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


@dataclasses.dataclass(frozen=True)
class SlurmJob:
    """A batch job of Slurm, which was requeued `restarts` times.

    Its id is for `scontrol`: "1234", or "1200_7" for a task of an array. (The SLURM_JOB_ID of an array's last task is
    the number of the whole array.)
    """

    id: str
    restarts: int


def slurm_job() -> SlurmJob | None:
    """The Slurm job of this process; None: it has none."""
    number, array = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_ARRAY_JOB_ID")
    if not number:
        return None
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    restarts = os.environ.get("SLURM_RESTART_COUNT", "")  # not set in the first run
    return SlurmJob(f"{array}_{task}" if array and task else number, int(restarts) if restarts.isdecimal() else 0)


def is_in_pod() -> bool:
    """Whether this process runs in a Kubernetes pod, where every container has the address of the API server."""
    return bool(os.environ.get("KUBERNETES_SERVICE_HOST"))
