"""The comparison of raw calls moves all bytes, with threads and with io_uring."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import disk_calls, huge_memory
from benchmarks.disk_calls import MIB, Way, move
from benchmarks.io_uring import Ring


def needs_ring() -> None:
    try:
        Ring(1).__exit__(None, None, None)
    except OSError as refused:
        pytest.skip(f"io_uring: {refused}")


@pytest.mark.parametrize("calls", ["threads", "preallocated", "io_uring"])
@pytest.mark.parametrize("under_way", [1, 4])
def test_every_byte_is_moved_there_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: str, under_way: int
) -> None:
    if calls == "io_uring":
        needs_ring()
    monkeypatch.setattr(disk_calls, "BUFFERS_BYTES", 8 * MIB)
    source, back = huge_memory.touched(8 * MIB), huge_memory.touched(8 * MIB)
    source[:] = np.random.default_rng(0).integers(0, 256, 8 * MIB, np.uint8)
    way = Way(calls, under_way, MIB)
    assert move(way, tmp_path / "file", 8 * MIB, source, write=True) > 0
    assert (tmp_path / "file").read_bytes() == source.tobytes()
    assert move(way, tmp_path / "file", 8 * MIB, back, write=False) > 0
    assert back.tobytes() == source.tobytes()


def test_refused_write_is_an_error(tmp_path: Path) -> None:
    needs_ring()
    (tmp_path / "file").write_bytes(b"")
    source = huge_memory.touched(MIB)
    with (tmp_path / "file").open("rb") as file, Ring(1) as ring, pytest.raises(OSError, match="moved -9 of"):
        ring.submit([(file.fileno(), 0, source)], write=True)
        ring.wait()
