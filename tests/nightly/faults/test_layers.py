"""Each check of a load or a verification is recognized by the error that it raises."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from jaxckpt_train import checkpoint
from jaxckpt_train.errors import CheckpointError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.manifest import digest_function
from jaxckpt_train.store.verify import verify
from tests.nightly.crash.explorer import small_sizes
from tests.nightly.faults.damages import Files
from tests.nightly.faults.layers import LAYERS, layer_of
from tests.nightly.faults.sample_runs import NEW, RUN, made, planted
from tests.support.memory_backend import MemoryBackend

STEP = f"{RUN}/{NEW}"
COMMIT, MANIFEST = f"{STEP}/COMMIT", f"{STEP}/manifest.json"
SEGMENT, VALUE = f"{STEP}/state/p00000-s000.safetensors", f"{STEP}/config/p00000.json"
DIGEST = digest_function("xxh3-128")


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with small_sizes():
        yield


@pytest.fixture(scope="module")
def pristine(_small: None) -> Files:
    return made("xxh3-128")


def set_to(path: str, change: Callable[[bytes], bytes]) -> Callable[[Files], None]:
    """Return a damage that changes one file."""

    def damage(files: Files) -> None:
        before, files[path] = files[path], change(files[path])
        assert files[path] != before

    return damage


def without(path: str) -> Callable[[Files], None]:
    def damage(files: Files) -> None:
        del files[path]

    return damage


def forged(path: str, old: bytes, new: bytes) -> Callable[[Files], None]:
    """Return a damage that changes bytes of a file, and updates all digests above it."""

    def damage(files: Files) -> None:
        before = files[path]
        assert old in before
        files[path] = after = before.replace(old, new, 1)
        manifest = files[MANIFEST]
        if path == SEGMENT:
            before, after = before[:4096], after[:4096]
        if path != MANIFEST:
            manifest = manifest.replace(DIGEST(before).encode(), DIGEST(after).encode())
            assert manifest != files[MANIFEST]
            files[MANIFEST] = manifest
        commit = msgspec.json.decode(files[COMMIT])
        sha256 = hashlib.sha256(files[MANIFEST]).hexdigest()
        commit |= {"manifest_bytes": len(files[MANIFEST]), "manifest_sha256": sha256}
        files[COMMIT] = msgspec.json.encode(commit)

    return damage


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def longer(data: bytes) -> bytes:
    return data + b" "


class Shrinking(MemoryBackend):
    """Truncate some files after they are opened."""

    def open(self, directory: str, name: str, *, direct: Any) -> Any:
        source = super().open(directory, name, direct=direct)
        if f"{directory}/{name}" in (SEGMENT, VALUE) and self.shrinks in name:
            del source._file.data[50:]
        return source

    shrinks = "\0"


def nothing(files: Files) -> None:
    pass


def all_of_it(files: Files) -> None:
    for path in [path for path in files if path.startswith(STEP)]:
        del files[path]


CASES: list[tuple[str, Callable[[Files], None]]] = [
    ("COMMIT: missing", without(COMMIT)),
    ("COMMIT: missing", all_of_it),
    ("COMMIT: size", set_to(COMMIT, lambda data: data.ljust(5000))),
    ("COMMIT: content", set_to(COMMIT, lambda _: b"rotten")),
    ("COMMIT: content", set_to(COMMIT, lambda data: data.replace(b"jaxckpt", b"jaxckqt"))),
    ("COMMIT: content", set_to(COMMIT, lambda data: data.replace(b'version":1', b'version":3'))),
    ("manifest: missing", without(MANIFEST)),
    ("manifest: size", set_to(MANIFEST, longer)),
    ("manifest: SHA-256", set_to(MANIFEST, flipped(70))),
    ("manifest: SHA-256", set_to(COMMIT, lambda data: data[:-10] + b'00000000"}')),
    ("manifest: content", forged(MANIFEST, b'"block_bytes":', b'"block_bytez":')),
    ("segment: missing", without(SEGMENT)),
    ("segment: size", set_to(SEGMENT, longer)),
    ("segment: digest of a block", set_to(SEGMENT, flipped(-1000))),
    ("value: missing", without(VALUE)),
    ("value: size", set_to(VALUE, longer)),
    ("value: digest", set_to(VALUE, flipped(9))),
]
LOADED_ONLY = [
    ("manifest: content", forged(MANIFEST, b'"kind":"array"', b'"kind":"arraz"')),
    ("value: content", forged(VALUE, b"{", b"[")),
]
VERIFIED_ONLY = [
    ("segment: digest of the header", set_to(SEGMENT, flipped(20))),
    ("segment: content of the header", forged(SEGMENT, b'"dtype"', b'"dtypo"')),
]
ENDS_EARLY = [("segment: ends early", ".safetensors"), ("value: ends early", ".json")]


def error_of_load(backend: MemoryBackend) -> str | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "backend_for", lambda _: backend)
        try:
            checkpoint.load_checkpointables(STEP)
        except CheckpointError as error:
            return str(error)
    return None


def error_of_verify(backend: MemoryBackend) -> str | None:
    try:
        return next(iter(verify(backend, STEP, StoreSettings(io_threads=1)).problems), None)
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize(("layer", "damage"), CASES + LOADED_ONLY)
def test_error_of_load_names_its_check(pristine: Files, layer: str, damage: Callable[[Files], None]) -> None:
    files = dict(pristine)
    damage(files)
    message = error_of_load(planted(files))
    assert message is not None
    assert layer_of(message, STEP) == layer, message


@pytest.mark.parametrize(("layer", "damage"), CASES)
def test_error_of_verification_names_its_check(pristine: Files, layer: str, damage: Callable[[Files], None]) -> None:
    files = dict(pristine)
    damage(files)
    message = error_of_verify(planted(files))
    assert message is not None
    assert layer_of(message, STEP) == layer, message


@pytest.mark.parametrize(("layer", "damage"), VERIFIED_ONLY)
def test_headers_are_checked_by_verification_only(pristine: Files, layer: str, damage: Callable[[Files], None]) -> None:
    files = dict(pristine)
    damage(files)
    assert error_of_load(planted(files)) is None
    message = error_of_verify(planted(files))
    assert message is not None
    assert layer_of(message, STEP) == layer, message


@pytest.mark.parametrize(("layer", "end"), ENDS_EARLY)
def test_file_that_shrinks_during_read_is_recognized(
    pristine: Files, layer: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Shrinking, "shrinks", end)
    for error_of in (error_of_load, error_of_verify):
        backend = Shrinking()
        backend._nodes = planted(pristine)._nodes
        message = error_of(backend)
        assert message is not None
        assert layer_of(message, STEP) == layer, message


def test_every_layer_has_a_case() -> None:
    assert {layer for layer, _ in (*CASES, *LOADED_ONLY, *VERIFIED_ONLY, *ENDS_EARLY)} == set(LAYERS)


@pytest.mark.parametrize(
    ("message", "layer"),
    [
        (f"{MANIFEST}: 3 bytes, but COMMIT says 4", "manifest: size"),
        (f"{MANIFEST}: missing, but COMMIT refers to it", "manifest: missing"),
        (
            f"{SEGMENT}: bytes 0 to 9 of leaf 'COMMIT: not valid: ' are not what was saved (sha256 differs)",
            "segment: digest of a block",
        ),
        (
            f"{SEGMENT}: bytes 0 to 9 of leaf 'a\nmanifest.json' are not what was saved (sha256 differs)",
            "segment: digest of a block",
        ),
        (f"{VALUE}: the manifest names this file, but: [Errno 2] cannot open: '{COMMIT}'", "value: missing"),
        (f"[Errno 5] cannot read: '{COMMIT}'", None),
        (f"{RUN}/step-0000000001/COMMIT: not valid: x", None),
        (f"{STEP}: was replaced while it was being read", None),
    ],
)
def test_begin_of_the_message_determines_the_layer(message: str, layer: str | None) -> None:
    assert layer_of(message, STEP) == layer
