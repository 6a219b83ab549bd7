"""Reads the pickle in PyTorch's metadata as data. Nothing in a file runs.

A pickle names classes and functions, and has them called. Here every name that PyTorch's metadata uses stands for a
record that keeps its arguments, and any other name is refused. No other module of the package may import `pickle`.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable
from typing import Any, TypeGuard, cast

from jaxckpt_train.errors import CorruptCheckpointError
from jaxckpt_train.store.manifest import shown

SIZE, DTYPE, _INDEX = "Size", "dtype", "MetadataIndex"
_KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", _INDEX, "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {SIZE},
    "torch.serialization": {"_get_layout"},
    "builtins": {"getattr"},  # Python 3.11 pickles a member of an enumeration as a call of getattr
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "WindowsPath"},  # the path of the save
    "pathlib._local": {"PosixPath", "WindowsPath"},
}  # fmt: skip
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
    """An object of the pickle: its name, its arguments, and its state. Its class is never imported."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: tuple[Any, ...] = ()) -> None:
        self.name, self.arguments = name, arguments
        self.state: Any = None

    def get(self, field: str) -> Any:
        """Return a field of a dataclass, or None if it has no such field."""
        return self.state.get(field) if isinstance(self.state, dict) else None


def is_record(found: object, name: str) -> TypeGuard[Record]:
    """Return whether an object is a record of this name."""
    return isinstance(found, Record) and found.name == name


def numbers_of(found: object) -> tuple[int, ...]:
    """Return the integers of a shape or of the offset of a chunk, or raise ValueError."""
    numbers = found.arguments[0] if is_record(found, SIZE) and len(found.arguments) == 1 else None
    if not isinstance(numbers, tuple | list) or any(type(number) is not int for number in numbers):
        raise ValueError("expected integers as a shape, found something else")
    return tuple(numbers)


def _key_of(key: object) -> object:
    """Return a key of a mapping: text, or for an index the name of an item and the offset of its chunk."""
    if not is_record(key, _INDEX):
        if not isinstance(key, str):
            raise ValueError(f"a mapping has a key of type {type(key).__name__}")
        return key
    name, offset = key.get("fqn"), key.get("offset")
    if not isinstance(name, str):
        raise ValueError("expected the name of a tensor or object, found something else")
    return name, None if offset is None else numbers_of(offset)


def read_metadata_pickle(data: bytes, path: str) -> Record:
    """Read the records of `.metadata`, without checking their content. Stored items have keys as `_key_of` returns."""
    try:
        found = _Unpickler(data, path).load()
    except CorruptCheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises many kinds of errors
        found = f"{type(error).__name__}: {shown(error)}"
        raise CorruptCheckpointError(f"{path}: expected PyTorch metadata, found something else: {found}") from error
    if not is_record(found, "Metadata"):
        raise CorruptCheckpointError(f"{path}: expected PyTorch metadata, found a {type(found).__name__}")
    return found


class _Name:
    """A name in the pickle, which makes a record or a dict when it is called."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class _Unpickler(pickle._Unpickler):
    """Makes records for the names that PyTorch's metadata uses, and calls nothing else.

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
        """Return a dtype as a record, or another name, without importing anything; refuse names of other things."""
        if module == "torch" and _DTYPE.fullmatch(name):
            return Record(DTYPE, (name,))
        if name not in _KNOWN.get(module, ()):
            raise CorruptCheckpointError(
                f"{self._path}: expected the metadata of PyTorch, found the name {shown(f'{module}.{name}')}, which it "
                "does not need; no code was run. A pickle can run any code: load it with PyTorch only if you trust its "
                "author"
            )
        return _Name(name)

    def _make(self) -> None:
        arguments, made = self.stack.pop(), self.stack.pop()
        if not isinstance(made, _Name) or not isinstance(arguments, tuple):
            raise ValueError(f"a value of type {type(made).__name__} is called")
        self.append({} if made.name == "OrderedDict" else Record(made.name, arguments))

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
            if type(mapping) is not dict:
                raise ValueError(f"a value of type {type(mapping).__name__} gets an item")
            mapping[_key_of(key)] = value

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
