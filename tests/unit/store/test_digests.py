"""Digest functions match their published values, for blocks of any length."""

from __future__ import annotations

import hashlib
import sys

import blake3
import numpy as np
import pytest
import xxhash

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.store.manifest import HEX_DIGITS, block_digests, digest_function

DIGEST_OF_EMPTY = {
    "xxh3-128": "99aa06d3014798d86001c324468d497f",
    "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "blake3": "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
}
REFERENCE = {
    "xxh3-128": lambda data: xxhash.xxh128_hexdigest(data),
    "sha256": lambda data: hashlib.sha256(data).hexdigest(),
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
}


@pytest.mark.parametrize("name", HEX_DIGITS)
def test_digest_matches_the_published_value(name: str) -> None:
    function = digest_function(name)
    data = np.arange(1000, dtype=np.uint8)
    assert function(b"") == DIGEST_OF_EMPTY[name]
    assert function(memoryview(data)) == REFERENCE[name](data.tobytes())
    assert len(function(b"x")) == HEX_DIGITS[name]


def test_an_unknown_digest_is_refused_with_the_choices() -> None:
    with pytest.raises(SettingsError, match="xxh3-128, sha256, blake3, found 'md5'"):
        digest_function("md5")


def test_missing_digest_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(SettingsError, match=r'pip install "jaxckpt-train\[blake3\]"'):
        digest_function("blake3")


@pytest.mark.parametrize("length", [0, 1, 9, 10, 11, 20, 25])
def test_each_block_is_digested_including_short_last(length: int) -> None:
    data = np.arange(length, dtype=np.uint8)
    expected = "".join(hashlib.sha256(data[at : at + 10].tobytes()).hexdigest() for at in range(0, length, 10))
    assert block_digests(data, 10, digest_function("sha256")) == expected
