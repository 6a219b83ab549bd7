"""Files of hosts that do not answer, or refuse for a reason that is not the step's fault: they are not lost."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxckpt_train.errors import StorageError
from jaxckpt_train.settings import FastTierSettings
from jaxckpt_train.store.backends.base import Source
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.backends.peers import FileServer, Peer
from jaxckpt_train.store.files import read_intact
from jaxckpt_train.tiers import host_files
from jaxckpt_train.tiers.fast_tier import FastTier
from jaxckpt_train.tiers.host_files import LAYOUT_NAME, HeldStep, HostFiles, Layout, encode_layout

TOKEN = b"t" * 32
STEP, NAME, CONTENT = "step-0000000001", "state/data", b"0123456789"
LAYOUT = encode_layout(Layout("xor", {0: [], 1: [(NAME, len(CONTENT))]}, []))


@contextlib.contextmanager
def another_host(tmp_path: Path, files: dict[str, bytes]) -> Iterator[tuple[HostFiles, FileServer]]:
    """A host without files, and the server of another one, with these files of a step."""
    for name, data in files.items():
        path = tmp_path / "other" / STEP / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (tmp_path / "here" / STEP).mkdir(parents=True)
    server, found = FileServer(str(tmp_path / "other"), TOKEN, "127.0.0.1"), HostFiles(str(tmp_path / "here"))
    held = HeldStep(STEP, is_intact=True, files={name: len(data) for name, data in files.items()})
    found.know([], {Peer(1, server.address, TOKEN, 0.2): [held]})
    try:
        yield found, server
    finally:
        server.close()


def test_step_of_a_host_that_does_not_answer_is_complete(tmp_path: Path) -> None:
    with another_host(tmp_path, {NAME: CONTENT}) as (files, server):
        (tmp_path / "here" / STEP / LAYOUT_NAME).write_bytes(LAYOUT)
        server.close()
        assert files.is_complete(STEP)
        with pytest.raises(StorageError) as refused:
            files.open(f"{files.root}/{STEP}", NAME, direct=False)
        assert refused.value.errno == errno.ECONNREFUSED


def test_host_that_goes_silent_is_no_damage(tmp_path: Path) -> None:
    with another_host(tmp_path, {NAME: CONTENT, LAYOUT_NAME: LAYOUT}) as (files, server):
        source = files.open(f"{files.root}/{STEP}", NAME, direct=False)
        server.close()
        with pytest.raises(StorageError) as refused:
            source.read_into(0, np.empty(len(CONTENT), np.uint8), len(CONTENT))
        assert refused.value.errno == errno.ECONNREFUSED


def test_layout_of_a_host_that_does_not_answer_is_not_missing(tmp_path: Path) -> None:
    with another_host(tmp_path, {NAME: CONTENT, LAYOUT_NAME: LAYOUT}) as (files, server):
        server.close()
        with pytest.raises(StorageError):
            files.layout(STEP)


def test_silent_copy_is_waited_for_once() -> None:
    asked = list[str]()

    class Copy:
        size, modified_ns, alignment = 10, 0, 1

        def __init__(self, name: str) -> None:
            self.name = name

        def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
            asked.append(self.name)
            if self.name == "silent":
                raise StorageError(errno.ETIMEDOUT, "timed out")

        def close(self) -> None:
            """Nothing is held."""

    source = host_files._ReplicatedSource(Copy("silent"), [lambda: Copy("other")])
    for offset in range(5):
        source.read_into(offset, np.empty(1, np.uint8), 1)
    assert asked == ["silent", *["other"] * 5]


@pytest.mark.parametrize("direct", [True, "auto", False])
def test_damage_of_all_copies_is_no_refusal(tmp_path: Path, direct: Any) -> None:
    copies = list[Callable[[], Source]]()
    for name, how in (("here", direct), ("elsewhere", False)):
        (tmp_path / name).write_bytes(bytes(10_000))
        copies.append(functools.partial(LocalBackend().open, str(tmp_path), name, direct=how))
    try:
        source = host_files._first_of(copies, 10_000)
    except StorageError as error:
        pytest.skip(str(error))
    data = np.ones(1808, np.uint8)
    assert not read_intact(source, 8192, data, lambda: False)
    source.read_copy(2, 8192, data)  # type: ignore[attr-defined]
    assert data.tobytes() == bytes(1808)
    source.close()


def test_copy_that_was_silent_is_read_where_the_others_are_damaged() -> None:
    refusals = [StorageError(errno.ETIMEDOUT, "timed out")]

    class Copy:
        size, modified_ns, alignment = 10, 0, 1

        def __init__(self, content: int) -> None:
            self.content = content

        def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
            if self.content and refusals:
                raise refusals.pop()
            data[:needed] = self.content

        def close(self) -> None:
            """Nothing is held."""

    source, data = host_files._ReplicatedSource(Copy(7), [lambda: Copy(0)]), np.empty(1, np.uint8)
    for offset in range(3):
        source.read_into(offset, data, 1)
        assert data[0] == 0
        assert read_intact(source, offset, data, lambda: data[0] == 7)


@pytest.mark.parametrize("name", ["COMMIT", NAME])
def test_file_that_cannot_be_opened_now_is_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tier, opened = FastTier(FastTierSettings(directory=str(tmp_path)), "run"), os.open
    path = Path(tier.directory, STEP, name)
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)

    def refuse(at: str, *arguments: int, **options: int) -> int:
        if at == path.name:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(at, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError) as refused:
        tier._steps_here()
    assert refused.value.errno == errno.EMFILE
