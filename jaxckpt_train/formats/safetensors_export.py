"""Writes a tree as safetensors files with an index, as Hugging Face lays models out."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from jaxckpt_train.errors import MismatchError, SettingsError
from jaxckpt_train.formats.safetensors_files import NAMED
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.appearing import appearing
from jaxckpt_train.store.backend import Backend, Opener
from jaxckpt_train.store.box_to_come import BoxToCome
from jaxckpt_train.store.boxes import Box, cut_box, full_box
from jaxckpt_train.store.digests import digest_function
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.layout import ChunkSource, PlacedChunk, SegmentLayout
from jaxckpt_train.store.manifest import ArrayRecord, PartRecord
from jaxckpt_train.store.read_ahead import BoxAhead, ReadAhead
from jaxckpt_train.store.reader import Progress
from jaxckpt_train.store.segment import Tensor, encode_header
from jaxckpt_train.store.segment_writer import SegmentWriter
from jaxckpt_train.store.transaction import Committed
from jaxckpt_train.store.writer import write_segments
from jaxckpt_train.tree.leaf_records import BoolLeaf, FloatLeaf, IntLeaf, KeyLeaf, LeafRecord, decode_tree, python_value
from jaxckpt_train.tree.paths import parse_key, split

SHARD_BYTES = 5 * 10**9
"""As Hugging Face's tools cut models by default."""
BAND_BYTES = 64 << 20
_METADATA = "__metadata__"
_DTYPES = {ours: theirs for theirs, ours in NAMED.items()}
_NUMBERS = {BoolLeaf: "bool", IntLeaf: "int64", FloatLeaf: "float64"}


_ToCome = Callable[[ArrayRecord, Sequence[Box]], Sequence[BoxAhead]]
"""Some boxes of an array, each of which is read about when it is written."""


class Exported(NamedTuple):
    """What was written.

    Attributes:
        files: names of the files with tensors.
        tensors: names of the tensors by leaf path.
        left_out: leaves that the format has nothing for: text, None, empty containers, complex numbers of Python's own.
        nbytes: of all tensors.
        prng_keys: leaves that are PRNG keys, of which the bare integers were written.
    """

    files: tuple[str, ...]
    tensors: Mapping[str, str]
    left_out: tuple[str, ...]
    nbytes: int
    prng_keys: tuple[str, ...]


class _Tensor(NamedTuple):
    """A tensor to write: its name, shape and dtype, and what it is read from: an array, or a number."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    content: ArrayRecord | np.ndarray

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def export_safetensors(
    files: Opener,
    committed: Committed,
    part: PartRecord,
    backend: Backend,
    final: str,
    settings: StoreSettings,
    *,
    separator: str = ".",
    shard_bytes: int = SHARD_BYTES,
    single_file: bool = False,
    metadata: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Write the tree of a checkpointable as a folder with `model.safetensors`, or several files and their index.

    With `single_file` one file is written, and no folder.

    Args:
        files: what the checkpoint is read from.
        committed: the opened checkpoint.
        part: the checkpointable.
        backend: where to write.
        final: the folder, or the file, an absolute path where nothing is.
        settings: how the checkpoint is verified, and how durable the files are made.
        separator: between the keys of a leaf path in the name of its tensor.
        shard_bytes: a file has no more bytes of tensors, unless one alone is larger.
        single_file: whether all tensors are written into one file that has the path `final`.
        metadata: free-form text for each file; None: `{"format": "pt"}`, which some readers insist on.
        progress: called with numbers of bytes as they are written.

    Raises:
        MismatchError: two leaves would get one name, or one the name that the format keeps for its metadata, or a
            dtype has none in safetensors.
        SettingsError: `shard_bytes` is no whole number above 0, or `separator` is empty.
        CheckpointExistsError: something is at `final`.
        CorruptCheckpointError: bytes of the checkpoint are not what was saved.
        StorageError: the file system refused.
    """
    if not isinstance(shard_bytes, int) or isinstance(shard_bytes, bool) or shard_bytes < 1:
        raise SettingsError(f"export: shard_bytes: expected a whole number of bytes above 0, found {shard_bytes!r}")
    if not isinstance(separator, str) or not separator:  # nobody could take the names apart again
        raise SettingsError(f'export: separator: expected text such as ".", found {separator!r}')
    leaves = decode_tree(part, committed.directory).leaves
    tensors, names, left_out = _tensors(committed, part, leaves, separator)
    shards = [tensors] if single_file else list(_shards(tensors, shard_bytes))
    count = len(shards)
    file_names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    file_names = file_names if count > 1 else ["model.safetensors"]
    told = {"format": "pt"} if metadata is None else metadata
    with (
        ReadAhead(settings.read_budget_bytes, committed.directory) as ahead,
        appearing(backend, final, settings, file_names[0] if single_file else None) as attempt,
    ):

        def to_come(array: ArrayRecord, boxes: Sequence[Box]) -> list[BoxAhead]:
            return ahead.of([BoxToCome(files, committed, array, box, settings) for box in boxes])

        layouts = [_layout(shard, to_come, told) for shard in shards]
        writers = [
            _writer(backend, f"{attempt.directory}/{name}", layout, settings)
            for layout, name in zip(layouts, file_names, strict=True)
        ]
        write_segments(backend, attempt.directory, writers, settings, progress, ahead.give_up)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        if count > 1:
            attempt.write_file("model.safetensors.index.json", _index(shards, file_names, nbytes))
    prng_keys = tuple(leaf for leaf, record in leaves.items() if isinstance(record, KeyLeaf))
    file_names = [final.rpartition("/")[2]] if single_file else file_names
    return Exported(tuple(file_names), names, tuple(left_out), nbytes, prng_keys)


def _writer(backend: Backend, path: str, layout: SegmentLayout, settings: StoreSettings) -> SegmentWriter:
    create = functools.partial(backend.create, path, direct=settings.direct_io)
    return SegmentWriter(layout, create, digest_function(settings.digest), settings.durability != "none")


def _index(shards: Sequence[Sequence[_Tensor]], names: Sequence[str], nbytes: int) -> bytes:
    places = {tensor.name: name for shard, name in zip(shards, names, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": nbytes}, "weight_map": places}
    return msgspec.json.format(msgspec.json.encode(index), indent=2)


def _tensors(
    committed: Committed, part: PartRecord, leaves: Mapping[str, LeafRecord], separator: str
) -> tuple[list[_Tensor], dict[str, str], list[str]]:
    arrays = {array.name: array for array in part.arrays}
    found, left_out, leaf_of = list[_Tensor](), list[str](), dict[str, str]()
    for leaf, record in leaves.items():
        content = _content(committed.directory, leaf, record, arrays.get(leaf))
        if content is None:
            left_out.append(leaf)
            continue
        name = separator.join(str(parse_key(key)) for key in split(leaf)) or "value"
        if name == _METADATA:
            raise MismatchError(
                f"{committed.directory}: leaf {leaf!r} would be called {name!r}, which in a safetensors file is its "
                f"metadata, so that nobody could read it; rename the leaf (--op 'rename {leaf} metadata'), or drop it"
            )
        dtype = DTYPES[content.dtype] if isinstance(content, ArrayRecord) else content.dtype
        if dtype.name not in _DTYPES:
            raise MismatchError(
                f"{committed.directory}: leaf {leaf!r} is of {dtype.name}, which safetensors has no name for; cast it "
                "(the operation cast), or leave it out (drop)"
            )
        if leaf_of.setdefault(name, leaf) != leaf:
            raise MismatchError(
                f"{committed.directory}: leaves {leaf_of[name]!r} and {leaf!r} would both be called {name!r}; rename "
                "one, or choose another separator"
            )
        found.append(_Tensor(name, content.shape, dtype, content))
    if not found:
        raise MismatchError(f"{committed.directory}: {part.name!r} has no arrays to export")
    return found, {leaf: name for name, leaf in leaf_of.items()}, left_out


def _content(subject: str, leaf: str, record: LeafRecord, array: ArrayRecord | None) -> ArrayRecord | np.ndarray | None:
    """What a leaf is as a tensor; None: it is none."""
    dtype = _NUMBERS.get(type(record))
    if array is not None or dtype is None:
        return array
    value = python_value(leaf, record, subject)
    if isinstance(record, IntLeaf) and not -(2**63) <= value < 2**63:
        raise MismatchError(f"{subject}: leaf {leaf!r}: an integer of {value.bit_length()} bits, expected at most 64")
    return np.asarray(value, dtype)


def _shards(tensors: Sequence[_Tensor], most: int) -> Iterator[list[_Tensor]]:
    shard: list[_Tensor] = []
    size = 0
    for tensor in tensors:
        if shard and size + tensor.nbytes > most:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.nbytes
    yield shard


def _layout(shard: Sequence[_Tensor], to_come: _ToCome, metadata: Mapping[str, str]) -> SegmentLayout:
    """One file: its head, and its tensors in bands, each read when its turn comes."""
    entries, at = list[Tensor](), 0
    for tensor in shard:
        entries.append(Tensor(tensor.name, _DTYPES[tensor.dtype.name], tensor.shape, at, at + tensor.nbytes))
        at += tensor.nbytes
    head = encode_header(entries, metadata)
    chunks = []
    for number, (tensor, entry) in enumerate(zip(shard, entries, strict=True)):
        start = len(head) + entry.start
        for source in _bands(tensor, to_come):
            chunks.append(PlacedChunk(number, source, start, source.data.nbytes))
            start += source.data.nbytes
    return SegmentLayout(head, chunks, len(head) + at)


def _bands(tensor: _Tensor, to_come: _ToCome) -> Iterator[ChunkSource]:
    if not tensor.nbytes:
        return
    if isinstance(tensor.content, np.ndarray):
        yield ChunkSource((), tensor.content)
        return
    boxes = list(cut_box(full_box(tensor.shape), tensor.dtype.itemsize, BAND_BYTES))
    yield from (ChunkSource(*each) for each in zip(boxes, to_come(tensor.content, boxes), strict=True))
