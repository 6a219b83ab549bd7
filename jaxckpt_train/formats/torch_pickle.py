"""Reads the pickle that PyTorch's metadata is, as data: no name in it stands for anything that runs.

The only file here that may import `pickle`. A pickle names classes and functions, and has them called. Here each name
that PyTorch's own metadata has stands for a record that keeps what it was given; any other name is refused.

Objects of a checkpoint of PyTorch that are no tensors, as leaves: numbers, text, and containers of them.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any, Self, cast

import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError, UnsupportedLeafError
from jaxckpt_train.pytree.flatten import MAX_DEPTH, join, key_text
from jaxckpt_train.pytree.leaves import ArrayLeaf, EmptyLeaf, LeafRecord, record_value
from jaxckpt_train.store.manifest import MAX_ARRAYS, shown

_METADATA, _PATHS = "torch.distributed.checkpoint.metadata", ("pathlib", "pathlib._local")
_DTYPE = re.compile(r"bool|(bfloat|float|complex|u?int|qu?int|bits)[0-9][0-9a-z_]{0,30}")
# What protocols 2 to 5 have for data, names and records. Not the older forms, nor what reserves memory by a number.
_OPCODES = (
    pickle.PROTO + pickle.FRAME + pickle.STOP + pickle.MARK + pickle.POP + pickle.POP_MARK
    + pickle.NONE + pickle.NEWTRUE + pickle.NEWFALSE + pickle.BININT + pickle.BININT1 + pickle.BININT2 + pickle.LONG1
    + pickle.BINFLOAT + pickle.BINUNICODE + pickle.SHORT_BINUNICODE + pickle.BINUNICODE8
    + pickle.EMPTY_TUPLE + pickle.TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3
    + pickle.EMPTY_LIST + pickle.APPEND + pickle.APPENDS + pickle.EMPTY_DICT
    + pickle.MEMOIZE + pickle.BINPUT + pickle.LONG_BINPUT + pickle.BINGET + pickle.LONG_BINGET
    + pickle.GLOBAL + pickle.STACK_GLOBAL
)  # fmt: skip


class Refused:
    """In place of an object that is more than plain data.

    Attributes:
        why: what it would take to make it.
    """

    def __init__(self, why: str) -> None:
        self.why = why


class _NotPlainError(Exception):
    """It holds what can be no leaf; the text says what."""


class ObjectLeaves:
    """The leaves of objects, gathered.

    Args:
        directory: of the checkpoint, for messages.
        array: makes an array of a tensor; of anything else None.

    Attributes:
        leaves: their records by leaf path.
        containers: the kinds of containers that are no dicts, by path.
        arrays: the arrays among the leaves.
        left_out: what can be no leaf, by the path of the object, and why.
    """

    def __init__(self, directory: str, array: Callable[[Any], np.ndarray | None]) -> None:
        self._directory, self._array, self._seen = directory, array, 0
        self.leaves: dict[str, LeafRecord] = {}
        self.containers: dict[str, str] = {}
        self.arrays: dict[str, np.ndarray] = {}
        self.left_out: dict[str, str] = {}

    def add(self, path: str, value: Any) -> None:
        """Add an object at a path, whole or not at all.

        Raises:
            CorruptCheckpointError: it is deeper, or has more leaves, than any that a training has.
        """
        inner = ObjectLeaves(self._directory, self._array)
        inner._seen = self._seen
        try:
            inner._walk(path, value, path.count("/"))
        except (_NotPlainError, UnsupportedLeafError) as error:
            self.left_out[path] = str(error)
        else:
            self.leaves |= inner.leaves
            self.containers |= inner.containers
            self.arrays |= inner.arrays
        self._seen = inner._seen

    def _walk(self, path: str, value: Any, depth: int) -> None:
        self._seen += 1
        if depth >= MAX_DEPTH or self._seen > MAX_ARRAYS:
            raise CorruptCheckpointError(
                f"{self._directory}: {path!r:.100}: objects of more than {MAX_DEPTH} levels or {MAX_ARRAYS:,} values"
            )
        if isinstance(value, Refused):
            raise _NotPlainError(value.why)
        if isinstance(value, dict | list | tuple):
            self._walk_container(path, value, depth)
            return
        array = self._array(value)
        record = record_value(path, value) if array is None else ArrayLeaf("numpy")
        if record is None:
            raise _NotPlainError(f"a {type(value).__name__} is no leaf")
        self.leaves[path] = record
        if array is not None:
            self.arrays[path] = array

    def _walk_container(self, path: str, value: Any, depth: int) -> None:
        if not isinstance(value, dict):
            self.containers[path] = "list" if isinstance(value, list) else "tuple"
        if not value:
            self.leaves[path] = EmptyLeaf()
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            name = join(path, key_text(key, path))
            if name in self.leaves:
                raise _NotPlainError(f"two keys of a mapping are {key!r}")
            self._walk(name, child, depth + 1)


class Record:
    """An object of the pickle: what its class was called with, and its state. Nothing of the class itself is here."""

    __slots__ = ("arguments", "state")
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> Self:
        """What a pickle makes of a name, by a call or without one."""
        record = super().__new__(cls)
        record.arguments, record.state = arguments, None
        return record

    def get(self, name: str) -> Any:
        """A field of a dataclass; None where it has none of this name."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class Metadata(Record):
    """All that the file says."""

    __slots__ = ()


class TensorEntry(Record):
    """What it says of a tensor."""

    __slots__ = ()


class BytesEntry(Record):
    """What it says of another object: nothing."""

    __slots__ = ()


class Chunk(Record):
    """A box of a tensor."""

    __slots__ = ()


class Properties(Record):
    """The dtype of a tensor and what else it has beside a shape."""

    __slots__ = ()


class Stored(Record):
    """Where something lies."""

    __slots__ = ()


class Dtype(Record):
    """A dtype by its name."""

    __slots__ = ()


class Other(Record):
    """What nobody asks for."""

    __slots__ = ()


class Size(Record):
    """A shape, or the begin of a chunk."""

    __slots__ = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        """Its numbers.

        Raises:
            ValueError: it is no row of integers.
        """
        found = self.arguments[0] if len(self.arguments) == 1 else None
        if not isinstance(found, tuple | list) or any(type(number) is not int for number in found):
            raise ValueError("expected integers as a shape, found something else")
        return tuple(found)


class Index(Record):
    """The name of an object, or of the chunk of a tensor that begins somewhere: a key of a mapping."""

    __slots__ = ()

    @property
    def key(self) -> tuple[str, tuple[int, ...] | None]:
        """The name, and where the chunk begins.

        Raises:
            ValueError: it has none such.
        """
        name, begin = self.get("fqn"), self.get("offset")
        if not isinstance(name, str) or not isinstance(begin, Size | None):
            raise ValueError("expected the name of a tensor or object, found something else")
        return name, None if begin is None else begin.numbers

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Index) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


_KNOWN: Mapping[tuple[str, str], type[Record] | type[dict[Any, Any]]] = {
    (_METADATA, "Metadata"): Metadata,
    (_METADATA, "MetadataIndex"): Index,
    (_METADATA, "TensorStorageMetadata"): TensorEntry,
    (_METADATA, "BytesStorageMetadata"): BytesEntry,
    (_METADATA, "ChunkStorageMetadata"): Chunk,
    (_METADATA, "TensorProperties"): Properties,
    (_METADATA, "StorageMeta"): Other,
    (_METADATA, "_MEM_FORMAT_ENCODING"): Other,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): Stored,
    ("torch", "Size"): Size,
    ("torch.serialization", "_get_layout"): Other,
    ("builtins", "getattr"): Other,  # Python 3.11 has it called for a member of an enumeration
    ("collections", "OrderedDict"): dict,
    **{(module, kind): Other for module in _PATHS for kind in ("PosixPath", "WindowsPath")},  # where it was saved
}


class _Unpickler(pickle._Unpickler):
    """Makes the records above of the names that they stand for, and calls nothing else.

    It is the one of `pickle` that is written in Python. That in C would take 64 GiB for one wrong number in a file, and
    cannot be told which operations there are.
    """

    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes, path: str) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """What a name stands for. It is imported from nowhere.

        Raises:
            CorruptCheckpointError: metadata of PyTorch does not have it.
        """
        if module == "torch" and _DTYPE.fullmatch(name):
            return Dtype(name)
        known = _KNOWN.get((module, name))
        if known is None:
            raise CorruptCheckpointError(
                f"{self._path}: names {shown(f'{module}.{name}')}, which metadata of PyTorch has no need of; nothing "
                "of it was run. A pickle can run any code: load it with PyTorch only if you trust who made it"
            )
        return known

    def _make(self) -> None:
        arguments, made = self.stack.pop(), self.stack.pop()
        if made is dict and arguments == ():
            self.append({})
        elif isinstance(made, type) and issubclass(made, Record):
            self.append(made(*arguments))
        else:
            raise ValueError(f"something of type {type(made).__name__} is called")

    def _give_state(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Record):
            raise ValueError(f"something of type {type(self.stack[-1]).__name__} is given attributes")
        self.stack[-1].state = state

    def _add_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._add(self.stack[-1], [key, value])

    def _add_items(self) -> None:
        items = self.pop_mark()
        self._add(self.stack[-1], items)

    def _add(self, mapping: Any, items: list[Any]) -> None:
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(mapping) is not dict or not isinstance(key, str | Index):
                raise ValueError(f"a mapping has a key of type {type(key).__name__}")
            mapping[key] = value

    dispatch = cast(
        "dict[int, Callable[[pickle.Unpickler], None]]",
        {code: pickle._Unpickler.dispatch[code] for code in _OPCODES}
        | {
            pickle.REDUCE[0]: _make,
            pickle.NEWOBJ[0]: _make,
            pickle.BUILD[0]: _give_state,
            pickle.SETITEM[0]: _add_item,
            pickle.SETITEMS[0]: _add_items,
        },
    )


def read_metadata_pickle(data: bytes, path: str) -> Metadata:
    """The records of `.metadata`. Nothing of what they hold is checked.

    Args:
        data: its bytes.
        path: of it, for messages.

    Raises:
        CorruptCheckpointError: it is no such pickle, or it names something else than such a pickle has.
    """
    try:
        found = _Unpickler(data, path).load()
    except CorruptCheckpointError:
        raise
    except Exception as error:  # a foreign parser: a damaged pickle fails in a dozen ways
        raise CorruptCheckpointError(
            f"{path}: expected metadata of PyTorch, but: {type(error).__name__}: {shown(error)}"
        ) from error
    if not isinstance(found, Metadata):
        raise CorruptCheckpointError(f"{path}: expected metadata of PyTorch, found a {type(found).__name__}")
    return found
