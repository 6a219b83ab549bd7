"""JAX's distributed runtime as a key-value store: the only place that touches jax.distributed and its private names."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Mapping
from typing import Any

import jax

from jaxckpt_train.distributed.coordinator import Coordinator, ManyProcesses, SingleProcess
from jaxckpt_train.errors import CheckpointError
from jaxckpt_train.store.threads import PerProcess

_NOTICE_KEY = "RECEIVED_PREEMPTION_NOTICE"


class JaxKeyValues:
    """The key-value store of JAX's coordination service, which process 0 runs: thread-safe, and uses no device."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def set(self, key: str, value: bytes) -> None:
        """Give a key its value."""
        self._asked(self._client.key_value_set_bytes, key, value, True)

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """The value, as soon as there is one; None: there was none for so many seconds."""
        found: bytes | None
        if timeout_s <= 0:  # a wait of a moment ends without it, however long it has been there, where many are asking
            found = self._asked(self._client.key_value_try_get_bytes, key)
            return found
        found = self._asked(self._client.blocking_key_value_get_bytes, key, max(1, int(timeout_s * 1000)))
        return found

    def find(self, folder: str) -> Mapping[str, bytes]:
        """The values of all keys below a folder."""
        found = self._asked(self._client.key_value_dir_get_bytes, f"{folder}/") or ()
        return {key.rpartition(f"{folder}/")[2]: value for key, value in found}

    def increment(self, key: str) -> int:
        """Add one to a count."""
        count: int = self._asked(self._client.key_value_increment, key, 1)
        return count

    def delete(self, folder: str) -> None:
        """Forget all keys below a folder."""
        self._asked(self._client.key_value_delete, f"{folder}/")

    def _asked(self, call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except jax.errors.JaxRuntimeError as error:
            if str(error).startswith(("DEADLINE_EXCEEDED", "NOT_FOUND")):
                return None
            raise CheckpointError(
                f"JAX's coordination service, through which the processes of this job agree, refused: {error}"
            ) from error


def current() -> Coordinator:
    """The coordinator of this job; the same one at every call."""
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return SingleProcess()
    from jax._src.distributed import global_state

    return _of_client.get(global_state.client)


class PreemptionService:
    """JAX's own service, which hears of a SIGTERM to any process of a job and has all of them leave at one place.

    It compares a number that every process gives at every place; here that counts the calls of the whole process, as a
    number that leaps, like that of a step, may never be met.
    """

    def __init__(self, client: Any, manager: Any) -> None:
        self._client, self._manager = client, manager
        self._calls, self._is_reached = 0, False

    def is_reached(self) -> bool:
        """Whether all processes leave, from one call on. All of them make the same calls, in one order."""
        self._calls += 1
        self._is_reached = self._is_reached or bool(self._manager.reached_sync_point(self._calls))
        return self._is_reached

    def noticed_before_s(self) -> float:
        """How many seconds ago the signal was noticed, by the clocks of two machines; 0 if that cannot be told."""
        try:
            told = self._client.key_value_try_get(_NOTICE_KEY)
            noticed = datetime.datetime.fromisoformat(_to_microseconds(told))
        except (jax.errors.JaxRuntimeError, ValueError):
            return 0.0
        return max(0.0, time.time() - noticed.timestamp())


def _to_microseconds(told: str) -> str:
    """A time of the service as Python reads it, which takes six decimals at most."""
    return re.sub(r"(\.\d{6})\d+", r"\1", told)


def preemption_service() -> PreemptionService | None:
    """The service of this job, the same one at every call; None: it has one process, or no such service."""
    if current().processes == 1:
        return None
    from jax._src.distributed import global_state

    return None if global_state.preemption_sync_manager is None else _service_of.get(global_state)


def _service(state: Any) -> PreemptionService:
    return PreemptionService(state.client, state.preemption_sync_manager)


def _made(client: Any) -> Coordinator:
    return ManyProcesses(JaxKeyValues(client), jax.process_index(), jax.process_count())


_of_client: PerProcess[Any, Coordinator] = PerProcess(_made)


_service_of: PerProcess[Any, PreemptionService] = PerProcess(_service)
