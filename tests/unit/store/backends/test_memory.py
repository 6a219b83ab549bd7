"""The memory backend keeps the backend contract; it is the reference model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.backend_contract import BackendContract
from tests.support.memory_backend import MemoryBackend


class TestMemory(BackendContract):
    @pytest.fixture
    def backend(self) -> MemoryBackend:
        return MemoryBackend()

    @pytest.fixture
    def root(self, backend: MemoryBackend) -> str:
        backend.make_directory("/runs", parents=True, sync=False)
        return "/runs"

    def raw(self, backend: Any, path: str) -> bytes:
        return bytes(backend._nodes[path].data)

    def names(self, backend: Any, path: str) -> list[str]:
        return sorted(name.rpartition("/")[2] for name in backend._nodes if name.rpartition("/")[0] == path)

    def backdate(self, backend: Any, path: str) -> None:
        for _ in range(3):  # its clock ticks with every change
            backend.append(path, b"")
        backend.touch(path)
        for number in range(3):
            backend.write_new(f"{path}{number}", b"")
            backend.remove(f"{path}{number}")
