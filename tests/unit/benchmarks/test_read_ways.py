"""Each way to read returns the bytes of the file, and wrong bytes are detected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xxhash

from benchmarks import read_ways
from benchmarks.read_ways import PIECE_BYTES, WAYS, measure


@pytest.mark.parametrize("way", WAYS)
def test_every_way_returns_bytes_and_digests(way: str, tmp_path: Path) -> None:
    content = np.random.default_rng(1).integers(0, 256, 3 * PIECE_BYTES // 2, np.uint8).tobytes()
    (tmp_path / "file").write_bytes(content)
    memory, digests = WAYS[way](tmp_path / "file", len(content))
    assert memory.tobytes() == content
    halves = content[:PIECE_BYTES], content[PIECE_BYTES:]
    assert digests == [xxhash.xxh3_128_hexdigest(half) for half in halves]


def test_other_bytes_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = np.zeros(PIECE_BYTES, np.uint8), [xxhash.xxh3_128_hexdigest(bytes(PIECE_BYTES))]
    monkeypatch.setattr(read_ways, "WAYS", {"wrong": lambda path, total: wrong})
    with pytest.raises(ValueError, match="wrong: other bytes"):
        measure(tmp_path, PIECE_BYTES, 1)
    assert list(tmp_path.iterdir()) == []
