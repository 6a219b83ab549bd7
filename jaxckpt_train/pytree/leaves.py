"""Leaves of pytrees: their paths as text, patterns that select them, and their records in a manifest. Needs no JAX.

A path is text such as `params/Dense_0/kernel`. A record describes an array, or holds a small Python value.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import operator
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal

import msgspec

from jaxckpt_train._validation import shown
from jaxckpt_train.errors import CorruptCheckpointError, MismatchError, SettingsError, UnsupportedLeafError
from jaxckpt_train.store.manifest import NOT_JSON, ArrayRecord, PartRecord

ROOT = "~"
MAX_DEPTH = 200
_CONTAINERS = (dict, list, tuple)
Key = Any  # str, int, bool, float, None, or a tuple of these
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_WORDS = {"": "~e", "__metadata__": "~m"}
_WORDS_BACK = {text: word for word, text in _WORDS.items()} | {"~n": None, "~b0": False, "~b1": True}
_ESCAPES = (("~", "~0"), ("/", "~1"), ("@", "~2"), (",", "~3"))
_ESCAPED = re.compile("~[012s]")
HOW_ESCAPED = "in a key ~ is written ~0, / is ~1 and @ is ~2; ~s marks text that looks like an integer"
Only = str | Sequence[str] | Callable[[str], bool] | None
_MOST_KEYS = 8
_MOST_COMPARED = 1000  # comparing more takes seconds
_PIECES = re.compile(r"\*\*|\*|\?|[^*?]+")
_MEANING = {"**": ".*", "*": "[^/]*", "?": "[^/]"}
MAX_INLINE_BYTES = 16 << 20


def refuse_too_deep(subject: str, tree: object) -> None:
    """Raise UnsupportedLeafError if dicts, lists and tuples are nested more deeply than Python can follow.

    Call it before JAX walks the tree: a RecursionError in the middle of that walk leaves the thread at Python's limit.
    """
    level: dict[int, Any] = {0: tree} if isinstance(tree, _CONTAINERS) else {}
    for _ in range(2 * MAX_DEPTH):  # `flatten` refuses what is less deep, with the path of the leaf
        if not level:
            return
        children = (node.values() if isinstance(node, dict) else node for node in level.values())
        level = {id(child): child for some in children for child in some if isinstance(child, _CONTAINERS)}
    raise _too_deep(subject, str(2 * MAX_DEPTH))


def _too_deep(subject: str, found: str) -> UnsupportedLeafError:
    return UnsupportedLeafError(
        f"{subject}: expected containers nested at most {MAX_DEPTH} levels deep, found more than {found}; flatten the "
        "tree, or look for a container that holds itself"
    )


@contextlib.contextmanager
def refused_if_too_deep(subject: str) -> Iterator[None]:
    """Convert the error that Python or JAX raises for a tree that is too deep to UnsupportedLeafError."""
    try:
        yield
    except (RecursionError, SystemError) as error:
        # JAX's C++ code raises SystemError where it does not expect a RecursionError from a function that it calls.
        if not isinstance(error, RecursionError) and not isinstance(error.__cause__, RecursionError):
            raise
        # The traceback has a thousand frames and would keep the tree alive.
        raise _too_deep(subject, f"Python can follow ({type(error).__name__})") from None


def key_text(key: Key, parent: str) -> str:
    """Write one key of a path below `parent` as text; raise UnsupportedLeafError if it has no form as text."""
    if isinstance(key, str):
        text = str.__str__(key)
        if text.isidentifier() and text != "__metadata__":
            return text
        if text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text):
            mark = "~s" if _INTEGER.fullmatch(text) else ""
            return _WORDS.get(text) or mark + text.replace("~", "~0").replace("/", "~1").replace("@", "~2")
    if isinstance(key, bool):
        return f"~b{int(key)}"
    if key is None:
        return "~n"
    if isinstance(key, float):
        return f"~f{key.hex()}"
    if isinstance(key, tuple) and not any(isinstance(part, tuple) for part in key):
        return "~t" + ",".join(key_text(part, parent).replace(",", "~3") for part in key)
    # ValueError: Python neither writes nor reads integers of some thousands of digits.
    with contextlib.suppress(TypeError, ValueError):
        return str(operator.index(key))
    raise UnsupportedLeafError(
        f"a key below {parent!r}: expected text of valid Unicode, a number, None or a tuple of these, found "
        f"{shown(key)} of type {type(key).__name__}; convert the key to text"
    )


def parse_key(text: str) -> Key:
    """Parse text that `key_text` wrote; raise ValueError or OverflowError if it never writes such text."""
    if "~" not in text:
        return int(text) if _INTEGER.fullmatch(text) else text
    if text in _WORDS_BACK:
        return _WORDS_BACK[text]
    mark, rest = text[:2], text[2:]
    if mark == "~t":
        if "~t" in rest:
            raise ValueError("a tuple within a tuple")
        return tuple(map(parse_key, rest.split(","))) if rest else ()
    if mark == "~f":
        return float.fromhex(rest)
    if mark == "~s":
        text = rest
    for plain, escaped in reversed(_ESCAPES):
        text = text.replace(escaped, plain)
    return text


def escapes_in(paths: str) -> str:
    """Return a remark on how keys are escaped, to append to these paths in a message; empty if none is escaped."""
    return f" ({HOW_ESCAPED})" if _ESCAPED.search(paths) else ""


def join(parent: str, key: str) -> str:
    """Return the path of a child from the path of its parent and its own key text."""
    return key if parent == ROOT else f"{parent}/{key}"


def split(path: str) -> list[str]:
    """Split a path into its key texts; the root has none."""
    return [] if path == ROOT else path.split("/")


def find_nested_leaves(leaves: Collection[str]) -> tuple[str, str] | None:
    """Find a leaf path and another leaf path above it, a pair that no tree can have; None: there is no such pair."""
    containers: set[str] = set()
    for name in leaves:
        at = name.rfind("/")
        while at >= 0 and (container := name[:at]) not in containers:
            containers.add(container)
            at = container.rfind("/")
    if ROOT in leaves:
        return next(((name, ROOT) for name in leaves if name != ROOT), None)
    above = next((name for name in leaves if name in containers), None)
    return None if above is None else next((name, above) for name in leaves if name.startswith(f"{above}/"))


def leaf_filter(only: Only) -> Callable[[str], bool]:
    """Compile patterns (`**`: anything, `*`: anything within a key) to a predicate of the leaf path."""
    if only is None:
        return lambda name: True
    if callable(only):
        return only
    patterns: object = (only,) if isinstance(only, str) else only
    if not isinstance(patterns, Collection) or not all(isinstance(pattern, str) for pattern in patterns):
        raise SettingsError(
            f'only: expected a pattern such as "params/**", a list of them or a predicate, found {shown(only)}'
        )
    exact = {pattern for pattern in patterns if not set(pattern) & set("*?")}
    compiled = [
        re.compile("".join(_MEANING.get(piece, re.escape(piece)) for piece in _PIECES.findall(pattern)), re.DOTALL)
        for pattern in patterns
        if pattern not in exact
    ]
    return lambda name: name in exact or any(expression.fullmatch(name) for expression in compiled)


def idle_pattern(only: Only, names: Collection[str]) -> Only:
    """Return the first pattern that selects nothing, probably because it is misspelt; None: all select something."""
    if only is None or callable(only) or isinstance(only, str) or not only:
        return None if only is None or any(map(leaf_filter(only), names)) else only
    known = set(names)
    return next((each for each in only if each not in known and not any(map(leaf_filter(each), names))), None)


def refuse_idle_pattern(subject: str, only: Only, names: Collection[str]) -> None:
    """Raise MismatchError if a pattern of a load selects nothing."""
    idle = idle_pattern(only, names)
    if idle is not None:
        raise MismatchError(
            f"{subject}: only={idle!r} selects none of {len(names)} leaves{suggestion(idle, names)}: "
            f"{describe_keys(idle if isinstance(idle, str) else '', names)}"
        )


def describe_keys(pattern: str, names: Collection[str]) -> str:
    """List what exists where a pattern that selects nothing leaves the tree, as patterns to use instead."""
    inside, above = list(names), ""
    for key in pattern.strip().split("/"):
        below = [name for name in inside if name.startswith(f"{above}{key}/")]
        if not below or set(key) & set("*?{"):
            break
        inside, above = below, f"{above}{key}/"
    keys = {name[len(above) :].partition("/") for name in inside}
    found = sorted({f"{above}{key}/**" if slash else f"{above}{key}" for key, slash, _ in keys})
    listed = ", ".join(map(repr, found[:_MOST_KEYS])) + (", ..." if len(found) > _MOST_KEYS else "")
    is_escaped = any("~" in each for each in (pattern, *found[:_MOST_KEYS]) if each != ROOT)
    return (listed or "none") + (f"; {HOW_ESCAPED}" if is_escaped else "")


def suggestion(only: Only, names: Collection[str], fits: Callable[[str], Callable[[str], bool]] = leaf_filter) -> str:
    """Ask for a similar pattern that selects something, or return nothing; `fits` makes a predicate from a pattern."""
    if callable(only) or only is None:
        return ""
    known = {key for name in names for key in name.split("/")}
    for given in [only] if isinstance(only, str) else only:
        pattern = given.strip()
        plain = pattern.strip("/").removesuffix("/*").removesuffix("/**")
        corrected = [key if set(key) & set("*?{") else _closest(key, known) for key in pattern.split("/")]
        for tried in (pattern, plain, f"{plain}/**", pattern.replace(".", "/"), "/".join(corrected)):
            if any(map(fits(tried), names)):
                return f', did you mean "{tried}"?'
    return ""


def _closest(key: str, known: Collection[str]) -> str:
    if key in known or len(known) > _MOST_COMPARED:
        return key
    return next(iter(difflib.get_close_matches(key, known, 1)), key)


class Empty:
    """The leaf of a container without children, which is no leaf for JAX but is one for a checkpoint."""


EMPTY = Empty()


@dataclasses.dataclass(frozen=True)
class Flat:
    """A flattened pytree: the paths of its leaves, and the leaves, including None and EMPTY.

    `containers`: paths of containers that are no plain dicts, with their kind: "list", "tuple", "namedtuple
    module.Type" or "object module.Type". `structure`: JAX's tree definition; None if it cannot be compared. `static`:
    static data (JSON) of nodes that are registered without keys, by path.
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
