"""A limit of what some processes write to a disk, kept by the kernel: a control group with a rate for a device."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

MOUNTS, OWN_GROUPS, DEVICES = Path("/proc/mounts"), Path("/proc/self/cgroup"), Path("/sys/dev/block")
PROBE_BYTES = 4 << 20


class CannotLimitError(RuntimeError):
    """There can be no such limit here; the message says why."""


@dataclasses.dataclass(frozen=True)
class WriteLimit:
    """One control group.

    Attributes:
        group: its directory.
        device: numbers of the block device, such as "254:0".
        is_v2: whether it is one of the second version of control groups.
    """

    group: str
    device: str
    is_v2: bool

    def set(self, bytes_per_s: int | None) -> None:
        """From now on its processes write no faster; None: as fast as they can.

        What they hand to the page cache is limited once it is synced by them.
        """
        if self.is_v2:
            rate = "max" if bytes_per_s is None else bytes_per_s
            Path(self.group, "io.max").write_text(f"{self.device} wbps={rate}", encoding="ascii")
        else:
            file = Path(self.group, "blkio.throttle.write_bps_device")
            file.write_text(f"{self.device} {bytes_per_s or 0}", encoding="ascii")

    def command(self) -> Sequence[str]:
        """A command to put before that of a process, which is in the group then."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', f"{self.group}/cgroup.procs"]


@contextlib.contextmanager
def write_limit(directory: Path) -> Iterator[WriteLimit]:
    """A group without a limit yet for the disk under `directory`; its processes must have ended when it is left.

    Raises:
        CannotLimitError: the directory lies on no block device, or there is no right to make the group.
    """
    device = device_of(directory)
    parent, is_v2 = _parent()
    group = parent / f"jaxckpt-bench-{os.getpid()}"
    try:
        if is_v2:
            (parent / "cgroup.subtree_control").write_text("+io", encoding="ascii")
        group.mkdir()
    except OSError as error:
        raise CannotLimitError(f"needs the right to make a control group: {error}") from error
    try:
        yield WriteLimit(str(group), device, is_v2)
    finally:
        group.rmdir()


def device_of(directory: Path, devices: Path = DEVICES) -> str:
    """The numbers of the disk that holds it, as the kernel's limits want them: not of a partition.

    Raises:
        CannotLimitError: there is none.
    """
    number = os.stat(directory).st_dev
    here = devices / f"{os.major(number)}:{os.minor(number)}"
    if not here.exists():
        raise CannotLimitError(f"{directory} lies on no block device")
    disk = here.resolve()
    if (disk / "partition").exists():
        disk = disk.parent
    return (disk / "dev").read_text(encoding="ascii").strip()


def _parent() -> tuple[Path, bool]:
    """The group under which a new one is made, which may limit writes, and whether it is of the second version."""
    mounts = [line.split() for line in MOUNTS.read_text(encoding="utf-8").splitlines()]
    for _, point, kind, options, *_ in mounts:
        if kind == "cgroup" and "blkio" in options.split(","):
            return Path(point) / _own("blkio"), False
    for _, point, kind, *_ in mounts:
        if kind == "cgroup2" and "io" in Path(point, "cgroup.controllers").read_text(encoding="ascii").split():
            return Path(point), True
    raise CannotLimitError("no control groups that limit a disk are mounted")


def _own(controller: str) -> str:
    """The group of this process, relative to where the controller's groups are mounted."""
    for line in OWN_GROUPS.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.lstrip("/")
    return ""


def measured_bytes_per_s(directory: str, nbytes: int) -> float:
    """How fast this process writes to a new file there, synced; run it in a process of the group."""
    path = Path(directory) / f"probe-{os.getpid()}"
    block = os.urandom(min(PROBE_BYTES, nbytes))
    began = time.monotonic()
    try:
        with path.open("wb", buffering=0) as file:
            for _ in range(max(1, nbytes // len(block))):
                file.write(block)
                os.fdatasync(file.fileno())
        return nbytes / (time.monotonic() - began)
    finally:
        path.unlink(missing_ok=True)
