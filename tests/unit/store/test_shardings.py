"""Each distinct sharding is stored once, within a limit on their total size."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.boxes import full_box
from jaxckpt_train.store.committed import open_committed
from jaxckpt_train.store.manifest import BLOCK_BYTES, FORMAT, FORMAT_VERSION, Manifest, PartRecord
from jaxckpt_train.store.segment import MAX_SHARDINGS_BYTES, ArraySource, ChunkSource, Shardings, decode_sharding
from jaxckpt_train.store.transaction import Transaction
from jaxckpt_train.store.writer import write_arrays
from tests.support.memory_backend import MemoryBackend

LARGE = "x" * (MAX_SHARDINGS_BYTES - 2)


def test_equal_shardings_are_stored_once() -> None:
    shardings = Shardings()
    first = {"mesh": {"x": 4}, "spec": ["x"]}
    found = {id(shardings.storable(dict(first))) for _ in range(10_000)}
    assert len(found) == 1


def test_shardings_beyond_the_limit_are_dropped() -> None:
    assert Shardings().storable(LARGE) == LARGE
    assert Shardings().storable(LARGE + "x") is None
    shardings = Shardings()
    assert [shardings.storable(each) for each in ("a", LARGE, "b", None, "a")] == ["a", None, "b", None, "a"]
    with pytest.raises(msgspec.ValidationError, match="more than 65,536 bytes"):
        shardings.shared(LARGE)


def test_oversized_raw_sharding_is_refused() -> None:
    assert decode_sharding(msgspec.Raw(msgspec.json.encode(LARGE))) == LARGE
    with pytest.raises(msgspec.ValidationError, match="more than"):
        decode_sharding(msgspec.Raw(b"[" * (MAX_SHARDINGS_BYTES + 1)))


def test_too_many_shardings_open_without_last() -> None:
    backend, data = MemoryBackend(), np.zeros(3)
    found = ["a", {"mesh": LARGE[:40_000]}, {"mesh": LARGE[1:40_001] + "y"}, None, "a", {"mesh": LARGE[:40_000]}]
    chunks = [ChunkSource(full_box(data.shape), data)]
    arrays = [ArraySource(f"x{number}", data.shape, data.dtype, chunks, each) for number, each in enumerate(found)]
    transaction = Transaction(backend, "/runs/a", StoreSettings())
    transaction.add_folder("state")
    done = write_arrays(backend, transaction.directory, "state", arrays, StoreSettings(), first_segment=0)
    part = PartRecord("state", "pytree", done.arrays, (), msgspec.Raw(b"null"))
    transaction.commit(Manifest(FORMAT, FORMAT_VERSION, "xxh3-128", BLOCK_BYTES, done.segments, (part,), {}))
    (opened,) = open_committed(backend, "/runs/a").manifest.parts
    assert [array.sharding for array in opened.arrays] == [*found[:2], None, None, "a", found[1]]
