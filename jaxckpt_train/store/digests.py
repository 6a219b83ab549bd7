"""Digests of data blocks: xxh3-128, sha256 and blake3, as lower-case hexadecimal text."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable

import numpy as np
import xxhash

from jaxckpt_train.errors import SettingsError

HEX_DIGITS = {"xxh3-128": 32, "sha256": 64, "blake3": 64}

HexDigest = Callable[[memoryview | bytes], str]


def digest_function(name: str) -> HexDigest:
    """The function from bytes to their hexadecimal digest.

    Raises:
        SettingsError: the name is unknown, or the package that computes it is not installed.
    """
    if name == "xxh3-128":
        return xxhash.xxh3_128_hexdigest
    if name == "sha256":
        return lambda data: hashlib.sha256(data).hexdigest()
    if name == "blake3":
        try:
            blake3 = importlib.import_module("blake3")
        except ImportError as error:
            raise SettingsError(
                'digest "blake3" needs the package blake3: pip install "jaxckpt-train[blake3]"'
            ) from error
        return lambda data: str(blake3.blake3(data).hexdigest())
    raise SettingsError(f"digest: expected one of {', '.join(HEX_DIGITS)}, found {name!r}")


def block_digests(data: np.ndarray, block_bytes: int, digest: HexDigest) -> str:
    """The digests of consecutive blocks of a flat uint8 array, joined; the last block may be shorter."""
    view = memoryview(data)
    return "".join(digest(view[at : at + block_bytes]) for at in range(0, len(view), block_bytes))
