"""The tests of runs, checkpoints and commands that cannot apply to object stores, with the reasons."""

from __future__ import annotations

# By file, or by file and test.
DISK_ONLY: dict[str, str] = {}


def reason_of(file: str, test: str) -> str | None:
    """Why a test applies to disks only; None: it applies to object stores, too."""
    return DISK_ONLY.get(file) or DISK_ONLY.get(f"{file}::{test}")
