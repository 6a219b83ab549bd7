"""The machine and the versions that figures were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jax", "jaxlib", "numpy", "orbax-checkpoint", "tensorstore", "jaxckpt_train")

Description = dict[str, str | int | float | None]


def describe(directory: Path) -> Description:
    """Cores, memory, kernel, the file system under `directory`, and versions."""
    device, mount_point, fs_type, options = _mount(directory)
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _field(Path("/proc/cpuinfo"), "model name"),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "load_average_1min": os.getloadavg()[0],
        "commit": commit(),
        "file_system": fs_type,
        "device": device,
        "mount_point": mount_point,
        "mount_options": options,
        "python": platform.python_version(),
        **versions(PACKAGES),
    }


def commit() -> str | None:
    """The commit of the code that runs, "-dirty" if files differ from it; None outside of a repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def version(package: str) -> str | None:
    """The installed version of a distribution, None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """The installed versions of distributions."""
    return {package: version(package) for package in packages}


def _field(file: Path, name: str) -> str | None:
    if not file.exists():
        return None
    lines = (line.partition(":") for line in file.read_text(encoding="utf-8").splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), None)


def _mount(directory: Path) -> tuple[str, str, str, str]:
    """Device, mount point, type and options of the file system that holds `directory`."""
    lines = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    holding = [fields for fields in map(str.split, lines) if directory.resolve().is_relative_to(fields[1])]
    deepest = max(len(fields[1]) for fields in holding)
    # A later mount hides an earlier one at the same point.
    device, point, fs_type, options, *_ = [fields for fields in holding if len(fields[1]) == deepest][-1]
    return device, point, fs_type, options
