"""Takes from the devices what this process needs in a job of many: its own parts of arrays that are shared."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from jaxckpt_train.settings import SnapshotMode
from jaxckpt_train.store.boxes import box_shape
from jaxckpt_train.store.layout import ArrayToCome, ChunkSource
from jaxckpt_train.tree.caller_context import nothing_set
from jaxckpt_train.tree.device_leaves import copies_if_wanted, own_handle, take_handles
from jaxckpt_train.tree.job_shares import OwnPart
from jaxckpt_train.tree.transfers import Ahead, Transfers


def take_own_parts(
    leaves: Sequence[Sequence[OwnPart]], mode: SnapshotMode, ahead: Ahead
) -> tuple[list[tuple[ChunkSource, ...]], Transfers]:
    """As `take_from_devices`, of parts of arrays.

    They are cut out on their device, before they leave it; in mode "stream", which makes nothing new there, afterwards.
    All is done by computations of single devices: processes may well choose different modes.
    """
    parts = [part for several in leaves for part in several]
    handles = [own_handle(part.held) for part in parts]
    data: Iterable[np.ndarray | ArrayToCome]
    if mode == "stream":
        taken, transfers = take_handles(handles, mode, ahead, is_copied=False)
        data = map(_inner, taken, parts)
    else:
        whole = [handle for handle, part in zip(handles, parts, strict=True) if part.inner is None]
        copies = copies_if_wanted(whole, mode)
        kept = iter(copies or whole)
        handles = [
            next(kept) if part.inner is None else cut_out(handle, part.inner)
            for handle, part in zip(handles, parts, strict=True)
        ]
        data, transfers = take_handles(handles, mode, ahead, is_copied=copies is not None)
    following = iter(data)
    return [tuple(ChunkSource(part.box, next(following)) for part in several) for several in leaves], transfers


def _inner(data: np.ndarray | ArrayToCome, part: OwnPart) -> np.ndarray | ArrayToCome:
    if part.inner is None:
        return data
    return data[part.inner] if isinstance(data, np.ndarray) else _PartToCome(data, part.inner, box_shape(part.box))


class _PartToCome:
    """A part of an array that is fetched when its turn comes; `store.layout.ArrayToCome` says what it promises."""

    def __init__(self, whole: ArrayToCome, inner: tuple[slice, ...], shape: tuple[int, ...]) -> None:
        self._whole, self._inner = whole, inner
        self.shape, self.dtype, self.size = shape, whole.dtype, math.prod(shape)
        self.nbytes = self.size * whole.dtype.itemsize

    def fetch(self) -> np.ndarray:
        """The data; may be called once, from any thread."""
        return self._whole.fetch()[self._inner]


def cut_out(array: jax.Array, inner: tuple[slice, ...]) -> jax.Array:
    """A part of an array of one device, made on that device; compiled once for each shape."""
    sizes = tuple(part.stop - part.start for part in inner)
    starts = tuple(np.int64(part.start) if max(array.shape) >= 1 << 31 else np.int32(part.start) for part in inner)
    with nothing_set():
        cut: jax.Array = _sliced(array, starts, sizes)
    return cut


@functools.partial(jax.jit, static_argnums=2)
def _sliced(array: jax.Array, starts: tuple[jax.Array, ...], sizes: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(array, starts, sizes)
