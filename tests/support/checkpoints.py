"""Write, read and rewrite small checkpoints with the store alone, as the layers above do."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.boxes import Box, full_box, slices_within
from jaxckpt_train.store.committed import Committed, open_committed
from jaxckpt_train.store.manifest import BLOCK_BYTES, FORMAT, FORMAT_VERSION, Manifest, PartRecord
from jaxckpt_train.store.read_plan import Wanted
from jaxckpt_train.store.reader import read_boxes
from jaxckpt_train.store.segment import ArraySource, ChunkSource
from jaxckpt_train.store.transaction import Transaction
from jaxckpt_train.store.writer import write_arrays

Boxes = Mapping[str, Sequence[Box]]


def commit(
    backend: Any,
    final: str,
    arrays: Mapping[str, np.ndarray],
    settings: StoreSettings,
    *,
    boxes: Boxes | None = None,
    replace: bool = False,
) -> Committed:
    """Write arrays, cut into the given boxes, as a checkpoint with one part; on an error the attempt stays."""
    transaction = Transaction(backend, final, settings)
    return transaction.commit(written(transaction, backend, arrays, settings, boxes), replace=replace)


def written(
    transaction: Transaction,
    backend: Any,
    arrays: Mapping[str, np.ndarray],
    settings: StoreSettings,
    boxes: Boxes | None = None,
) -> Manifest:
    """Write arrays into an attempt, without the commit."""
    transaction.add_folder("state")
    sources = []
    for name, array in arrays.items():
        cuts = (boxes or {}).get(name, [full_box(array.shape)])
        chunks = [ChunkSource(box, array[(*slices_within(box, full_box(array.shape)), ...)]) for box in cuts]
        sources.append(ArraySource(name, array.shape, array.dtype, chunks))
    done = write_arrays(backend, transaction.directory, "state", sources, settings, first_segment=0)
    part = PartRecord("state", "pytree", done.arrays, (), msgspec.Raw(b"null"))
    return Manifest(FORMAT, FORMAT_VERSION, settings.digest, BLOCK_BYTES, done.segments, (part,), {})


def load(backend: Any, path: str, settings: StoreSettings, boxes: Boxes | None = None) -> dict[str, list[np.ndarray]]:
    """Read the given boxes, or whole arrays, of all arrays."""
    return load_committed(backend, open_committed(backend, path), settings, boxes)


def load_committed(
    backend: Any, committed: Committed, settings: StoreSettings, boxes: Boxes | None = None
) -> dict[str, list[np.ndarray]]:
    """Like `load`, for an opened checkpoint."""
    arrays = committed.manifest.parts[0].arrays
    wanted = [Wanted(array, (boxes or {}).get(array.name, [full_box(array.shape)])) for array in arrays]
    found = read_boxes(backend, committed, wanted, settings)
    return {array.name: content for array, content in zip(arrays, found, strict=True)}


def rewrite(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and update COMMIT: damage that no digest finds."""
    file = checkpoint / "manifest.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    data = json.dumps(manifest, separators=(",", ":"), ensure_ascii=False).encode()
    file.write_bytes(data)
    commit = {"format": "jaxckpt", "format_version": manifest["format_version"], "manifest_bytes": len(data)}
    commit["manifest_sha256"] = hashlib.sha256(data).hexdigest()
    (checkpoint / "COMMIT").write_text(json.dumps(commit, separators=(",", ":")))
