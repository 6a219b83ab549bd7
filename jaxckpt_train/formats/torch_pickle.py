"""Reads the pickle in PyTorch's metadata as data, and turns plain objects into leaves. Nothing in a file runs.

A pickle names classes and functions, and has them called. Here every name that PyTorch's metadata uses stands for a
record that keeps its arguments, and any other name is refused. No other module of the package may import `pickle`.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any, Self, cast

import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError, UnsupportedLeafError
from jaxckpt_train.pytree.leaves import ArrayLeaf, EmptyLeaf, LeafRecord, record_value
from jaxckpt_train.pytree.paths import MAX_DEPTH, join, key_text
from jaxckpt_train.store.manifest import MAX_ARRAYS, shown

_METADATA, _PATHS = "torch.distributed.checkpoint.metadata", ("pathlib", "pathlib._local")
_DTYPE = re.compile(r"bool|(bfloat|float|complex|u?int|qu?int|bits)[0-9][0-9a-z_]{0,30}")
# The opcodes of protocols 2 to 5 for data, names and records, without older forms and those that allocate a given size.
_OPCODES = (
    pickle.PROTO + pickle.FRAME + pickle.STOP + pickle.MARK + pickle.POP + pickle.POP_MARK
    + pickle.NONE + pickle.NEWTRUE + pickle.NEWFALSE + pickle.BININT + pickle.BININT1 + pickle.BININT2 + pickle.LONG1
    + pickle.BINFLOAT + pickle.BINUNICODE + pickle.SHORT_BINUNICODE + pickle.BINUNICODE8
    + pickle.EMPTY_TUPLE + pickle.TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3
    + pickle.EMPTY_LIST + pickle.APPEND + pickle.APPENDS + pickle.EMPTY_DICT
    + pickle.MEMOIZE + pickle.BINPUT + pickle.LONG_BINPUT + pickle.BINGET + pickle.LONG_BINGET
    + pickle.GLOBAL + pickle.STACK_GLOBAL
)  # fmt: skip


class Record:
    """An object of the pickle: the arguments of its class, and its state. The class itself is never imported."""

    __slots__ = ("arguments", "state")
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> Self:
        """Create the record of a name, whether the pickle calls it or not."""
        record = super().__new__(cls)
        record.arguments, record.state = arguments, None
        return record

    def get(self, name: str) -> Any:
        """Return a field of a dataclass, or None if it has no such field."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class Metadata(Record):
    """The content of the file."""

    __slots__ = ()


class TensorEntry(Record):
    """The metadata of a tensor."""

    __slots__ = ()


class BytesEntry(Record):
    """The metadata of another object, which is empty."""

    __slots__ = ()


class Chunk(Record):
    """A box of a tensor."""

    __slots__ = ()


class Properties(Record):
    """The dtype and other properties of a tensor, without its shape."""

    __slots__ = ()


class Stored(Record):
    """The position of a tensor or object in a file."""

    __slots__ = ()


class Dtype(Record):
    """A dtype by name."""

    __slots__ = ()


class Other(Record):
    """A record that is not used."""

    __slots__ = ()


class Size(Record):
    """A shape, or the offset of a chunk."""

    __slots__ = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        """The integers.

        Raises:
            ValueError: the argument is not a sequence of integers.
        """
        found = self.arguments[0] if len(self.arguments) == 1 else None
        if not isinstance(found, tuple | list) or any(type(number) is not int for number in found):
            raise ValueError("expected integers as a shape, found something else")
        return tuple(found)


class Index(Record):
    """A key of the mapping of stored items: the name of an object, or of a tensor with the offset of a chunk."""

    __slots__ = ()

    @property
    def key(self) -> tuple[str, tuple[int, ...] | None]:
        """The name, and the offset of the chunk.

        Raises:
            ValueError: the record has no valid name or offset.
        """
        name, offset = self.get("fqn"), self.get("offset")
        if not isinstance(name, str) or not isinstance(offset, Size | None):
            raise ValueError("expected the name of a tensor or object, found something else")
        return name, None if offset is None else offset.numbers

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
    ("builtins", "getattr"): Other,  # Python 3.11 pickles a member of an enumeration as a call of getattr
    ("collections", "OrderedDict"): dict,
    **{(module, kind): Other for module in _PATHS for kind in ("PosixPath", "WindowsPath")},  # the path of the save
}


def read_metadata_pickle(data: bytes, path: str) -> Metadata:
    """Read the records of `.metadata`, without checking their content.

    Args:
        data: the bytes of the file.
        path: the path of the file, for messages.

    Raises:
        CorruptCheckpointError: it is not a pickle of PyTorch's metadata, or it uses other names.
    """
    try:
        found = _Unpickler(data, path).load()
    except CorruptCheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises many kinds of errors
        raise CorruptCheckpointError(
            f"{path}: expected PyTorch metadata, found something else: {type(error).__name__}: {shown(error)}"
        ) from error
    if not isinstance(found, Metadata):
        raise CorruptCheckpointError(f"{path}: expected PyTorch metadata, found a {type(found).__name__}")
    return found


class _Unpickler(pickle._Unpickler):
    """Creates the records above for the names that they stand for, and calls nothing else.

    This is the implementation of `pickle` in Python. The one in C would allocate 64 GiB for a single wrong number in a
    file, and its opcodes cannot be restricted.
    """

    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes, path: str) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """Return the record class of a name, without importing anything.

        Raises:
            CorruptCheckpointError: PyTorch's metadata does not use the name.
        """
        if module == "torch" and _DTYPE.fullmatch(name):
            return Dtype(name)
        known = _KNOWN.get((module, name))
        if known is None:
            raise CorruptCheckpointError(
                f"{self._path}: expected the metadata of PyTorch, found the name {shown(f'{module}.{name}')}, which it "
                "does not need; no code was run. A pickle can run any code: load it with PyTorch only if you trust its "
                "author"
            )
        return known

    def _make(self) -> None:
        arguments, made = self.stack.pop(), self.stack.pop()
        if made is dict and arguments == ():
            self.append({})
        elif isinstance(made, type) and issubclass(made, Record):
            self.append(made(*arguments))
        else:
            raise ValueError(f"a value of type {type(made).__name__} is called")

    def _give_state(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Record):
            raise ValueError(f"a value of type {type(self.stack[-1]).__name__} gets attributes")
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


class Refused:
    """Replaces an object that is more than plain data.

    Attributes:
        why: what creating the object would do.
    """

    def __init__(self, why: str) -> None:
        self.why = why


class _NotPlainError(Exception):
    """An object contains a value that cannot be a leaf. The message names the value."""


class ObjectLeaves:
    """Collects the leaves of objects.

    Args:
        directory: the directory of the checkpoint, for messages.
        array: converts a tensor to an array, and returns None for anything else.

    Attributes:
        leaves: the records by leaf path.
        containers: the kinds of containers other than dicts, by path.
        arrays: the arrays among the leaves.
        left_out: the reasons why objects were left out, by their paths.
    """

    def __init__(self, directory: str, array: Callable[[Any], np.ndarray | None]) -> None:
        self._directory, self._array, self._seen = directory, array, 0
        self.leaves: dict[str, LeafRecord] = {}
        self.containers: dict[str, str] = {}
        self.arrays: dict[str, np.ndarray] = {}
        self.left_out: dict[str, str] = {}

    def add(self, path: str, value: Any) -> None:
        """Add an object at a path, as a whole or not at all.

        Raises:
            CorruptCheckpointError: it is deeper, or has more leaves, than any training state.
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
                f"{self._directory}: {path!r:.100}: expected at most {MAX_DEPTH} levels and {MAX_ARRAYS:,} values of "
                "objects, found more"
            )
        if isinstance(value, Refused):
            raise _NotPlainError(value.why)
        if isinstance(value, dict | list | tuple):
            self._walk_container(path, value, depth)
            return
        array = self._array(value)
        record = record_value(path, value) if array is None else ArrayLeaf("numpy")
        if record is None:
            raise _NotPlainError(f"a {type(value).__name__} cannot be a leaf")
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
                raise _NotPlainError(f"a mapping has the key {key!r} twice")
            self._walk(name, child, depth + 1)
