"""Change valid files at random, as JSON, lines or bytes; or inflate them to many times their size."""

from __future__ import annotations

import json
import random
from typing import Any

from jaxckpt_train.store.segment import LENGTH_BYTES

WORDS: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, -(2**63), 10**30, 0.5, 1e308, "", ".", "..", "/", "../../etc/passwd",
    "/etc/passwd", "a/b", "a\0b", "CON", "manifest.json", "COMMIT", "\ud800", "é", "x" * 300, [], {}, [[]], [0], [-1],
    [2**40, 2**40], {"a": 1}, "float32", "bool", "int4", "object", "O", "<f4", "xxh3-128", "sha256", "md5", "0" * 32,
    "F32", "BF16", "(1,,)i4", "~fzz", "~f0x1p99999", "~t~t", "9" * 5000, 10**400, [2**61, 0],
]  # fmt: skip
MANY: list[Any] = [None, 0, 257, 2**70, 0.5, "", "ab", "\0", [], {}, [0], {"a": 1}, [[]]]
MANY_BYTES = (b"[", b"9", b" ", b"\0", b"\x80", b"\x90", b"\xc0", b"\n", b"{}\n", b"[[]]\n")


def changed(data: bytes, chance: random.Random) -> bytes:
    """Change data as JSON if it is (with a length prefix or by line); otherwise, and sometimes anyway, as bytes."""
    if chance.random() < 0.7:
        prefix = _length_prefix(data)
        try:
            tree = json.loads(data[prefix:])
        except ValueError:
            lines = data.splitlines(keepends=True)
            at = chance.randrange(len(lines)) if lines else 0
            return b"".join([*lines[:at], changed(lines[at], chance), *lines[at + 1 :]]) if len(lines) > 1 else b"{}"
        for _ in range(chance.randint(1, 3)):
            tree = _changed_tree(tree, chance)
        return _joined(json.dumps(tree, separators=(",", ":")).encode(), prefix)
    return _changed_bytes(bytearray(data), chance)


def _length_prefix(data: bytes) -> int:
    """Return the size of the length prefix before the JSON."""
    return LENGTH_BYTES if data[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{" and data[:1] != b"{" else 0


def _joined(text: bytes, prefix: int) -> bytes:
    if not prefix:
        return text
    text = text.ljust(-(-(len(text) + prefix) // 4096) * 4096 - prefix)
    return len(text).to_bytes(prefix, "little") + text


def _changed_tree(node: Any, chance: random.Random) -> Any:
    if isinstance(node, dict) and node and chance.random() < 0.9:
        key = chance.choice(list(node))
        match chance.randrange(12):
            case 0:
                return {each: value for each, value in node.items() if each != key}
            case 1:
                return {**node, str(chance.choice(WORDS)): chance.choice(WORDS)}
            case _:
                return {**node, key: _changed_tree(node[key], chance)}
    if isinstance(node, list) and node and chance.random() < 0.9:
        at = chance.randrange(len(node))
        match chance.randrange(12):
            case 0:
                return [*node[:at], *node[at + 1 :]]
            case 1:
                return [*node, node[at]]
            case 2:
                return [*node, *node * chance.randint(1, 50)]
            case _:
                return [*node[:at], _changed_tree(node[at], chance), *node[at + 1 :]]
    if isinstance(node, int) and chance.random() < 0.6:
        return node + chance.choice((-1, 1, 64, 4096, -4096, 1 << 31, 1 << 62))
    if isinstance(node, str) and node and chance.random() < 0.5:
        at = chance.randrange(len(node))
        return node[:at] + chance.choice(("", "0", "/", "..", "\0", "é", node)) + node[at + 1 :]
    return chance.choice(WORDS)


def _changed_bytes(data: bytearray, chance: random.Random) -> bytes:
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(5):
            case 0:
                del data[at : at + chance.randint(1, 50)]
            case 1:
                data[at:at] = chance.randbytes(chance.randint(1, 8))
            case 2:
                data[at:at] = data[: chance.randint(1, 200)]
            case 3:
                data[at:at] = chance.choice(
                    (
                        b"[" * 3000,
                        b'{"a":' * 3000,
                        b"\x81\xa1a" * 500,
                        b"9" * 5000,
                        b'"\\ud800"',
                        b"NaN",
                        b"-0",
                        b"1e999",
                    )
                )
            case _:
                if at < len(data):
                    data[at] ^= 1 << chance.randrange(8)
    return bytes(data)


def inflated(data: bytes, chance: random.Random, size: int) -> bytes:
    """Repeat or extend one element of the data, until it has about `size` bytes."""
    prefix = _length_prefix(data)
    lines = [] if prefix else data.splitlines(keepends=True)
    if len(lines) > 1 or (lines and chance.random() < 0.2):
        at = chance.randrange(len(lines))
        line = lines[at] * (size // len(lines[at])) if chance.random() < 0.5 else inflated(lines[at], chance, size)
        return b"".join([*lines[:at], line, *lines[at + 1 :]])
    try:
        tree = json.loads(data[prefix:])
    except ValueError:
        at, many = chance.randrange(len(data) + 1), chance.choice(MANY_BYTES)
        count = size // len(many)
        announced = chance.choice((b"", b"\xdd" + count.to_bytes(4, "big")))  # the MessagePack header of a list
        return data[:at] + announced + many * count + data[at:]
    return _joined(json.dumps(_inflated_tree(tree, chance, size), separators=(",", ":")).encode(), prefix)


def _inflated_tree(node: Any, chance: random.Random, size: int) -> Any:
    inner = list(node.items() if isinstance(node, dict) else enumerate(node)) if isinstance(node, (dict, list)) else []
    if inner and chance.random() < 0.8:
        at, chosen = chance.choice(inner)
        found = node.copy()
        found[at] = _inflated_tree(chosen, chance, size)
        return found
    many = chance.choice([*MANY, *([chance.choice(inner)[1]] if inner else [])])
    count, count_of_keys = size // (len(json.dumps(many)) + 1), size // (len(json.dumps(many)) + len('"1ffff":,'))
    if isinstance(node, list):
        return [*node, *[many] * count]
    if isinstance(node, dict):
        return {**node, **{f"{number:x}": many for number in range(count_of_keys)}}
    return [many] * count if chance.random() < 0.5 else "x" * size
