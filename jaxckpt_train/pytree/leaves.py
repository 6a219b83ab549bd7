"""The records of leaves in a manifest, with small Python values inline, and the values that can be stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from jaxckpt_train.errors import CorruptCheckpointError, UnsupportedLeafError
from jaxckpt_train.pytree.paths import MAX_DEPTH
from jaxckpt_train.store.manifest import NOT_JSON, ArrayRecord, PartRecord

MAX_INLINE_BYTES = 16 << 20


class Empty:
    """The leaf of a container without children, which is no leaf for JAX but is one for a checkpoint."""


EMPTY = Empty()


@dataclasses.dataclass(frozen=True)
class Flat:
    """A flattened pytree.

    Attributes:
        names: leaf paths.
        leaves: the leaves, including None and EMPTY.
        containers: for every container that is not a plain dict, its path and its kind: "list", "tuple",
            "namedtuple module.Type" or "object module.Type".
        structure: JAX's tree definition, for comparisons; None for a tree whose structure cannot be compared.
        static: path and static data (JSON) of each node that is registered without keys.
    """

    names: Sequence[str]
    leaves: Sequence[Any]
    containers: dict[str, str]
    structure: Any = None
    static: dict[str, str] = dataclasses.field(default_factory=dict)


class _Record(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True, tag_field="kind"):
    pass


class ArrayLeaf(_Record, frozen=True, gc=False, tag="array"):
    """An array in the store. `host`: its type before the save; `weak`: JAX's weak type; `big_endian`: numpy's order."""

    host: Literal["jax", "numpy", "scalar"] = "jax"
    weak: bool = False
    big_endian: bool = False


class KeyLeaf(_Record, frozen=True, gc=False, tag="key"):
    """A typed PRNG key array: the store has its key data, the record its implementation."""

    impl: str


class IntLeaf(_Record, frozen=True, gc=False, tag="int"):
    """A Python int of any size: decimal, or hexadecimal beyond 64 bits."""

    value: str


class FloatLeaf(_Record, frozen=True, gc=False, tag="float"):
    """A Python float in the hexadecimal form of `float.hex`, which is exact and can express nan and inf."""

    value: str


class ComplexLeaf(_Record, frozen=True, gc=False, tag="complex"):
    """A Python complex; both parts have the form of FloatLeaf."""

    real: str
    imag: str


class BoolLeaf(_Record, frozen=True, gc=False, tag="bool"):
    """A Python bool."""

    value: bool


class StrLeaf(_Record, frozen=True, gc=False, tag="str"):
    """A Python str."""

    value: str


class BytesLeaf(_Record, frozen=True, gc=False, tag="bytes"):
    """A Python bytes, in base64."""

    value: bytes


class NoneLeaf(_Record, frozen=True, gc=False, tag="none"):
    """None."""


class EmptyLeaf(_Record, frozen=True, gc=False, tag="empty"):
    """A container without children."""


LeafRecord = (
    ArrayLeaf | KeyLeaf | IntLeaf | FloatLeaf | ComplexLeaf | BoolLeaf | StrLeaf | BytesLeaf | NoneLeaf | EmptyLeaf
)
STORED = (ArrayLeaf, KeyLeaf)
PYTHON_TYPES = {BoolLeaf: bool, IntLeaf: int, FloatLeaf: float, ComplexLeaf: complex, StrLeaf: str, BytesLeaf: bytes}


class TreeRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A pytree as data, by path: `containers` and `static` as in `Flat`, and records of the leaves."""

    containers: dict[str, str]
    leaves: dict[str, LeafRecord]
    static: dict[str, str] = {}


def encode_tree(record: TreeRecord) -> msgspec.Raw:
    """Encode a record for the manifest."""
    return msgspec.Raw(msgspec.json.encode(record))


def has_tree(part: PartRecord) -> bool:
    """Return whether a checkpointable is a tree with leaves, and not a value of another kind."""
    return bytes(part.detail) != b"null"


def decode_tree(part: PartRecord, subject: str) -> TreeRecord:
    """Decode the tree of a checkpointable; raise CorruptCheckpointError if it is malformed, or not of its arrays."""
    try:
        record = msgspec.json.decode(part.detail, type=TreeRecord)
    except NOT_JSON as error:
        raise CorruptCheckpointError(f"{subject}: tree of {part.name!r}: {error}") from error
    if msgspec.json.encode(record) != bytes(part.detail):
        raise CorruptCheckpointError(f"{subject}: tree of {part.name!r} is not in canonical form")
    if any(name.count("/") >= MAX_DEPTH for name in record.leaves):
        raise CorruptCheckpointError(f"{subject}: tree of {part.name!r} is nested deeper than {MAX_DEPTH} levels")
    stored = {name for name, leaf in record.leaves.items() if isinstance(leaf, STORED)}
    if stored != {array.name for array in part.arrays}:
        raise CorruptCheckpointError(f"{subject}: tree of {part.name!r} does not match its arrays")
    return record


def record_value(name: str, value: Any) -> LeafRecord | None:
    """Return the record of a leaf that is stored inline; None for a leaf that is not."""
    kind = type(value)
    if value is None:
        return NoneLeaf()
    if kind is bool:
        return BoolLeaf(value)
    if kind is int:
        return IntLeaf(hex(value) if value.bit_length() > 64 else str(value))
    if kind is float:
        return FloatLeaf(value.hex())
    if kind is complex:
        return ComplexLeaf(value.real.hex(), value.imag.hex())
    if kind not in (str, bytes):
        return None
    if len(value) > MAX_INLINE_BYTES:
        raise UnsupportedLeafError(
            f"leaf {name!r}: {kind.__name__} of length {len(value)}, expected at most {MAX_INLINE_BYTES}; store it as "
            "a numpy uint8 array"
        )
    if kind is bytes:
        return BytesLeaf(value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedLeafError(f"leaf {name!r}: text is not valid Unicode: {error}; store it as bytes") from error
    return StrLeaf(value)


def python_value(name: str, record: LeafRecord, subject: str) -> Any:
    """Return the Python value that `record_value` recorded; raise CorruptCheckpointError if there is none."""
    try:
        match record:
            case IntLeaf(value):
                return int(value, 0)
            case FloatLeaf(value):
                return float.fromhex(value)
            case ComplexLeaf(real, imag):
                return complex(float.fromhex(real), float.fromhex(imag))
            case BoolLeaf(value) | StrLeaf(value) | BytesLeaf(value):
                return value
            case _:
                return None
    except (ValueError, OverflowError) as error:
        raise CorruptCheckpointError(f"{subject}: leaf {name!r}: {error}") from error


def describe_saved(saved: LeafRecord, array: ArrayRecord | None) -> str:
    """Describe a saved leaf in a few words: `float32[512,128]`, `key<threefry2x32>[]`, `int`, `None`."""
    match saved:
        case ArrayLeaf() if array is not None:
            return f"{array.dtype}{shape_text(array.shape)}"
        case KeyLeaf(impl) if array is not None:
            return f"key<{impl}>{shape_text(array.shape[:-1])}"
        case NoneLeaf():
            return "None"
        case EmptyLeaf():
            return "an empty container"
        case _:
            return f"Python {PYTHON_TYPES[type(saved)].__name__}"


def shape_text(shape: tuple[int, ...]) -> str:
    """Write a shape in brackets."""
    return f"[{','.join(map(str, shape))}]"
