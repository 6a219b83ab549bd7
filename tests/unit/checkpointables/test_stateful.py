"""Objects that write and read their own files by Orbax's StatefulCheckpointable protocol."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import warnings
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import jaxckpt_train as jct


class Tokenizer:
    """An object of Orbax's protocol: cheap work is in `save` itself, slow work in the awaitable that it returns."""

    def __init__(self, words: dict[str, int]) -> None:
        self.words = words
        self.threads: list[str] = []
        self.loads = 0

    async def save(self, directory: Any) -> Awaitable[None]:
        self.threads.append(threading.current_thread().name)
        return self._write(directory, json.dumps(self.words))

    async def _write(self, directory: Any, text: str) -> None:
        self.threads.append(threading.current_thread().name)
        path = await directory.await_creation()
        await asyncio.sleep(0)
        (path / "words.json").write_text(text)
        (path / "merges").mkdir()
        (path / "merges" / "0.txt").write_text("a b")

    async def load(self, directory: Any) -> Awaitable[None]:
        self.loads += 1
        return self._read(directory)

    async def _read(self, directory: Path) -> None:
        self.words = json.loads((directory / "words.json").read_text())
        assert (directory / "merges" / "0.txt").read_text() == "a b"


class Failing(Tokenizer):
    """Fails at the given place."""

    def __init__(self, where: str) -> None:
        super().__init__({})
        self.where = where

    async def save(self, directory: Any) -> Awaitable[None]:
        if self.where == "foreground":
            raise ConnectionError("the vocabulary server is gone")
        if self.where == "too early":
            (directory.path / "words.json").write_text("")
        return await super().save(directory)

    async def _write(self, directory: Any, text: str) -> None:
        await super()._write(directory, text)
        if self.where == "background":
            raise ConnectionError("the vocabulary server is gone")
        if self.where == "hidden file":
            (directory.path / ".cache").write_text("")


def parts(tokenizer: Tokenizer) -> dict[str, Any]:
    return {"state": {"w": jnp.ones(3)}, "tokenizer": tokenizer}


def test_object_writes_in_background_and_loads_in_place(tmp_path: Path) -> None:
    saved = Tokenizer({"hello": 1})
    pending = jct.save_checkpointables_async(tmp_path / "c", parts(saved))
    saved.words = {"changed": 2}
    pending.wait()
    main, background = saved.threads
    assert main == threading.current_thread().name
    assert background != main
    target = Tokenizer({})
    found = jct.load_checkpointables(tmp_path / "c", {"tokenizer": target})
    assert found["tokenizer"] is target
    assert target.words == {"hello": 1}
    assert (tmp_path / "c" / "tokenizer" / "words.json").read_text() == '{"hello": 1}'
    assert jct.verify(tmp_path / "c").ok
    described = jct.metadata(tmp_path / "c").checkpointables["tokenizer"]
    assert (described.kind, described.tree, described.bytes) == ("stateful", None, 15)


def test_save_works_inside_running_event_loop(tmp_path: Path) -> None:
    async def loop() -> Tokenizer:
        jct.save_checkpointables(tmp_path / "c", parts(Tokenizer({"hello": 1})))
        target = Tokenizer({})
        jct.load_checkpointables(tmp_path / "c", {"tokenizer": target})
        return target

    assert asyncio.run(loop()).words == {"hello": 1}


def test_object_that_does_all_in_foreground_returns_nothing(tmp_path: Path) -> None:
    class Plain(Tokenizer):
        async def save(self, directory: Any) -> Any:
            self.threads.append("saved")

        async def load(self, directory: Any) -> Any:
            self.loads += 1

    target = Plain({})
    jct.save_checkpointables(tmp_path / "c", {"p": target})
    jct.load_checkpointables(tmp_path / "c", {"p": target})
    assert (target.threads, target.loads) == (["saved"], 1)


def test_foreground_failure_is_raised_by_the_call(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match="the vocabulary server is gone"):
        jct.save_checkpointables_async(tmp_path / "c", parts(Failing("foreground")))
    assert list(tmp_path.iterdir()) == []


def test_background_failure_is_raised_by_wait(tmp_path: Path) -> None:
    jct.save_checkpointables(tmp_path / "c", parts(Tokenizer({"old": 0})))
    pending = jct.save_checkpointables_async(tmp_path / "c", parts(Failing("background")), overwrite=True)
    with pytest.raises(ConnectionError, match="the vocabulary server is gone") as caught:
        pending.wait()
    assert any(str(tmp_path / "c") in note for note in caught.value.__notes__)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    target = Tokenizer({})
    jct.load_checkpointables(tmp_path / "c", {"tokenizer": target})
    assert target.words == {"old": 0}


@pytest.mark.parametrize(
    ("where", "error", "reason"),
    [
        ("too early", jct.CheckpointError, r"save\(directory\) used its directory before it returned"),
        ("hidden file", jct.UnsupportedLeafError, r"'tokenizer/\.cache' has a name that cannot be stored"),
    ],
)
def test_misuse_of_the_directory_is_refused(where: str, error: type[Exception], reason: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=reason):
        jct.save_checkpointables(tmp_path / "c", parts(Failing(where)))
    assert list(tmp_path.iterdir()) == []


def test_unstarted_writes_are_dropped_without_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(jct.StorageError):  # the directory cannot be made
            jct.save_checkpointables(tmp_path / "file" / "c", parts(Tokenizer({})))
        with pytest.raises(ConnectionError):  # the second one fails in the foreground
            jct.save_checkpointables(tmp_path / "c", {"a": Tokenizer({}), "b": Failing("foreground")})
        with pytest.raises(ConnectionError):  # the first one fails in the background
            jct.save_checkpointables(tmp_path / "c", {"a": Failing("background"), "b": Tokenizer({})})
        gc.collect()
    assert [str(warning.message) for warning in caught] == []


@pytest.mark.parametrize("name", ["words.json", "merges/0.txt"])
def test_changed_byte_is_found_before_object_reads(name: str, tmp_path: Path) -> None:
    jct.save_checkpointables(tmp_path / "c", parts(Tokenizer({"hello": 1})))
    file = tmp_path / "c" / "tokenizer" / name
    data = bytearray(file.read_bytes())
    data[1] ^= 1
    file.write_bytes(data)
    target = Tokenizer({"kept": 1})
    with pytest.raises(jct.CorruptCheckpointError, match=f"tokenizer/{name}"):
        jct.load_checkpointables(tmp_path / "c", {"tokenizer": target})
    assert target.loads == 0
    assert target.words == {"kept": 1}
    assert not jct.verify(tmp_path / "c").ok


@pytest.mark.parametrize("verified", [True, False])
def test_missing_or_longer_file_is_found(tmp_path: Path, verified: bool) -> None:
    chosen = jct.StoreSettings(verify_on_load=verified)
    jct.save_checkpointables(tmp_path / "c", parts(Tokenizer({"hello": 1})))
    file = tmp_path / "c" / "tokenizer" / "words.json"
    file.write_text(file.read_text() + " ")
    with pytest.raises(jct.CorruptCheckpointError, match=r"words\.json.* 13 .* 12"):
        jct.load_checkpointables(tmp_path / "c", {"tokenizer": Tokenizer({})}, settings=chosen)
    file.unlink()
    with pytest.raises(jct.CorruptCheckpointError, match=r"words\.json"):
        jct.load_checkpointables(tmp_path / "c", {"tokenizer": Tokenizer({})}, settings=chosen)


@pytest.mark.parametrize("verified", [True, False])
def test_files_come_from_same_checkpoint_as_rest(tmp_path: Path, verified: bool) -> None:
    """The checkpoint is overwritten right before the object reads its files, which keep their sizes."""

    class Late(Tokenizer):
        async def _read(self, directory: Path) -> None:
            if self.loads == 1:
                await asyncio.to_thread(jct.save_checkpointables, tmp_path / "c", saved(2), overwrite=True)
            await super()._read(directory)

    def saved(number: int) -> dict[str, Any]:
        return {"tokenizer": Tokenizer({"at": number}), "notes": jct.JsonValue({"at": number})}

    jct.save_checkpointables(tmp_path / "c", saved(1))
    target = Late({})
    found = jct.load_checkpointables(
        tmp_path / "c",
        {"notes": jct.JsonValue(None), "tokenizer": target},
        settings=jct.StoreSettings(verify_on_load=verified),
    )
    assert target.loads == 2
    assert found["notes"].value == target.words == {"at": 2}


@pytest.mark.parametrize("target", [None, 3, {"w": 1}])
def test_stateful_files_load_only_into_stateful_object(target: Any, tmp_path: Path) -> None:
    jct.save_checkpointables(tmp_path / "c", parts(Tokenizer({"hello": 1})))
    with pytest.raises(jct.MismatchError, match="'tokenizer'"):
        jct.load_checkpointables(tmp_path / "c", {"tokenizer": target})
    with pytest.raises(jct.MismatchError, match=r"'state': .*'pytree'.* Tokenizer"):
        jct.load_checkpointables(tmp_path / "c", {"state": Tokenizer({})})


def test_a_failing_load_raises_its_own_error(tmp_path: Path) -> None:
    class Reader(Tokenizer):
        async def _read(self, directory: Path) -> None:
            raise LookupError("no such word")

    jct.save_checkpointables(tmp_path / "c", parts(Tokenizer({})))
    with pytest.raises(LookupError, match="no such word"):
        jct.load_checkpointables(tmp_path / "c", {"tokenizer": Reader({})})
