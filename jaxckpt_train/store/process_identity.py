"""What the system tells of processes and of the machine: who this one is, whether another lives, how much memory.

Whether malloc takes large blocks in huge pages and gives them back at once, and how a process begins so.

What a library allocates for each large chunk that it decodes comes fresh from the kernel and goes back to it. In pages
of 4 KiB its first touch takes longer than to decode it; in huge ones it is some hundredth of that. GNU's libc asks for
them if it is told so before a process begins, and in no other way (`glibc.malloc.hugetlb`, since 2.35). It also keeps
blocks of up to 32 MiB for later, in each thread, once one of that size was given back, unless it is told where to stop
(`glibc.malloc.mmap_threshold`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

VARIABLE, TUNABLE, THRESHOLD = "GLIBC_TUNABLES", "glibc.malloc.hugetlb", "glibc.malloc.mmap_threshold"
KEPT_BYTES = 4 << 20  # larger blocks go back at once
POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SINCE = (2, 35)
MOST_PID = 1 << 31  # no process has such a number


def has_huge_malloc() -> bool:
    """Whether this process has it."""
    return _tunables(os.environ).get(TUNABLE, "0") != "0" and _can()


def variables_of_huge_malloc(variables: Mapping[str, str]) -> dict[str, str] | None:
    """The environment of a process that has it, made of another one.

    None: that one decides it already, or it can have none on this system.
    """
    decided = _tunables(variables)
    if TUNABLE in decided or not _can():
        return None
    told = [variables.get(VARIABLE, ""), f"{TUNABLE}=1", "" if THRESHOLD in decided else f"{THRESHOLD}={KEPT_BYTES}"]
    return {**variables, VARIABLE: ":".join(filter(None, told))}


def begin_again(words: list[str]) -> None:
    """Have this very process run a command instead of what it runs, by the same Python; comes back if it has it.

    Interrupts wait until `has_begun_again` is called there: Python tells of one that comes while it starts.
    """
    variables = variables_of_huge_malloc(os.environ)
    if variables is not None and sys.executable:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        with contextlib.suppress(OSError):  # what it does is slower without
            os.execve(sys.executable, words, variables)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def has_begun_again() -> None:
    """Let interrupts through again, if this process was begun by `begin_again`."""
    if f"{TUNABLE}=1" in os.environ.get(VARIABLE, ""):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _tunables(variables: Mapping[str, str]) -> dict[str, str]:
    pairs = (each.partition("=") for each in variables.get(VARIABLE, "").split(":"))
    return {name: value for name, _, value in pairs}


def _can() -> bool:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        version = re.match(r"glibc (\d+)\.(\d+)", os.confstr("CS_GNU_LIBC_VERSION") or "")
        if version is not None and (int(version[1]), int(version[2])) >= SINCE:
            return "[never]" not in POLICY.read_text()
    return False


class ProcessIdentity(msgspec.Struct, frozen=True):
    """A process, told apart from every other that ever ran: on this machine, before a reboot, in another container.

    `start`, `boot` and `namespace` are empty where the system does not say (no /proc). `nonce` is random, and says of
    a process whether it is this very one also there; it is empty in records of earlier versions.
    """

    host: str
    pid: int
    start: str
    boot: str = ""
    namespace: str = ""
    nonce: str = ""


class _Nonce:
    """A random number of this process: a forked child has another one."""

    def __init__(self) -> None:
        self.draw()

    def draw(self) -> None:
        self.value = secrets.randbits(48)


_nonce = _Nonce()


os.register_at_fork(after_in_child=_nonce.draw)


def this_process() -> ProcessIdentity:
    """The process that calls."""
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    boot = _read("/proc/sys/kernel/random/boot_id").strip()
    pid, nonce = os.getpid(), f"{_nonce.value:012x}"
    return ProcessIdentity(socket.gethostname(), pid, _start_of(pid), boot, namespace, nonce)


def descriptor_path(pid: int, descriptor: int, begins: str) -> str:
    """Where a descriptor of another process is found, if what it stands for has a name that begins like this.

    Raises:
        OSError: it cannot be seen from here, as from another container; or it is another process's with that number.
    """
    path = f"/proc/{pid}/fd/{descriptor}"
    if not os.readlink(path).startswith(begins):  # first: to open another one, such as a pipe, might wait for ever
        raise OSError(errno.ENOENT, "another process has this number here", path)
    return path


def machine_id() -> str:
    """The same for all processes of this machine, in whatever containers; empty where the system does not tell."""
    return this_process().boot


def is_dead(other: ProcessIdentity) -> bool | None:
    """Whether a process is surely gone (True) or surely alive (False); None if that cannot be known from here.

    It can be known of this very process, and of one whose machine, boot, PID namespace and start are all known: a
    number alone may be that of another process, in another container or after a reboot.
    """
    here = this_process()
    if other.nonce and other.nonce == here.nonce:
        return False
    if other.host != here.host or not 0 < other.pid < MOST_PID:
        return None
    if not (other.boot and other.namespace and other.start):
        return None
    if other.boot != here.boot:
        return None  # this machine before it was booted anew, or another one of the same name
    if other.namespace != here.namespace:
        return None
    try:
        os.kill(other.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it exists and belongs to someone else
    if _stat_of(other.pid)[:1] in (["Z"], ["X"]):
        return True  # ended, and its parent has not asked for its exit code
    start = _start_of(other.pid)  # hidden where /proc shows a user its own processes only
    return start != other.start if start else None


def command_name(pid: int) -> str:
    """The name of a process's program, 15 bytes of it at most; empty where the system does not tell."""
    return _read(f"/proc/{pid}/comm").strip()


def open_below(directory: str) -> list[str]:
    """Which processes of this machine have files below a directory open, as far as this user may see them."""
    found, top = list[str](), f"{os.path.realpath(directory)}/"
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            target = os.readlink(link)
            if target.startswith(top):
                found.append(f"{target} in process {link.parts[2]}")
    return found


def memory_bytes() -> int:
    """All the memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def process_tag() -> str:
    """This process in a form that file names can hold: `<machine>-<boot>-<pid>-<start>`."""
    me = this_process()
    return f"{_short(me.host + me.namespace)}-{_short(me.boot)}-{me.pid}-{me.start or _nonce.value}"


def is_dead_tag(tag: str) -> bool:
    """Whether the process with this tag is surely gone: it ran on this machine, before a reboot or until it ended."""
    me = this_process()
    machine, boot, pid, start = tag.split("-")
    if not (me.boot and me.namespace) or machine != _short(me.host + me.namespace):
        return False
    if boot != _short(me.boot):
        return True
    return is_dead(ProcessIdentity(me.host, int(pid), start, me.boot, me.namespace)) is True


def is_tag_of_another_boot(tag: str) -> bool:
    """Whether the process with this tag ran before this machine was started anew: the power may have gone since."""
    return tag.split("-")[1] != _short(this_process().boot)


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _start_of(pid: int) -> str:
    """When a process started, in clock ticks since boot; the same pid used again has another."""
    stat = _stat_of(pid)
    return stat[19] if len(stat) > 19 else ""


def process_age_s() -> float | None:
    """Seconds since this process was made; None where the system does not tell."""
    try:
        ticks, up_s = int(_start_of(os.getpid())), float(_read("/proc/uptime").split()[0])
    except (ValueError, IndexError):
        return None
    return max(0.0, up_s - ticks / os.sysconf("SC_CLK_TCK"))


def _stat_of(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the state on; empty where the system does not tell."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


@dataclasses.dataclass(frozen=True)
class SlurmJob:
    """A batch job of Slurm.

    Attributes:
        id: as `scontrol` takes it: "1234", of one task of an array "1200_7". The number that the last task of an array
            has in SLURM_JOB_ID is that of the whole array.
        restarts: how often it was requeued.
    """

    id: str
    restarts: int


def slurm_job(environment: Mapping[str, str] | None = None) -> SlurmJob | None:
    """The Slurm job that this process belongs to; None: none.

    Args:
        environment: variables; None: those of this process.
    """
    variables = os.environ if environment is None else environment
    number, array = variables.get("SLURM_JOB_ID"), variables.get("SLURM_ARRAY_JOB_ID")
    if not number:
        return None
    task = variables.get("SLURM_ARRAY_TASK_ID")
    restarts = variables.get("SLURM_RESTART_COUNT", "")  # there is none in the first start
    return SlurmJob(f"{array}_{task}" if array and task else number, int(restarts) if restarts.isdecimal() else 0)


def is_in_pod(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this process runs in a pod of Kubernetes, which gives every container the address of its API.

    Args:
        environment: variables; None: those of this process.
    """
    return bool((os.environ if environment is None else environment).get("KUBERNETES_SERVICE_HOST"))
