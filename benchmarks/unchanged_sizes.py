"""The sizes of the state with adapters, and what its saves write."""

from __future__ import annotations

from pathlib import Path

MIB = 1 << 20
BLOCKS, WIDTH, RANK = 16, 1024, 26
"""The adapters and their two moments have about 10 MiB."""


def base_rows(mib: int) -> int:
    """The rows of the base weights of a block, as float32."""
    return mib * MIB // BLOCKS // WIDTH // 4


def written_below(folder: Path) -> dict[tuple[int, int], int]:
    """The sizes of all files below a folder, by what they are and when they changed; a second name counts once."""
    stats = [path.lstat() for path in folder.rglob("*") if path.is_file()]
    return {(each.st_ino, each.st_mtime_ns): each.st_size for each in stats}
