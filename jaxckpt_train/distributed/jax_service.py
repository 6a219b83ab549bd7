"""JAX's distributed runtime: the only module that uses `jax.distributed` and its private names."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Mapping
from typing import Any

import jax

from jaxckpt_train.distributed.coordinator import Coordinator, ManyProcesses
from jaxckpt_train.errors import CheckpointError
from jaxckpt_train.store.threads import PerProcess

_NOTICE_KEY = "RECEIVED_PREEMPTION_NOTICE"


class JaxKeyValues:
    """The key-value store of JAX's coordination service, which process 0 runs. Thread-safe; uses no device."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def set(self, key: str, value: bytes) -> None:
        """Set the value of a key."""
        self._call(self._client.key_value_set_bytes, key, value, True)

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """Wait for the value of a key; None: there was none for `timeout_s` seconds."""
        found: bytes | None
        if timeout_s <= 0:  # under load, a blocking get with a tiny timeout expires even if the key has a value
            found = self._call(self._client.key_value_try_get_bytes, key)
        else:
            found = self._call(self._client.blocking_key_value_get_bytes, key, max(1, int(timeout_s * 1000)))
        return found

    def find(self, folder: str) -> Mapping[str, bytes]:
        """Return the values of all keys below a folder."""
        found = self._call(self._client.key_value_dir_get_bytes, f"{folder}/") or ()
        return {key.rpartition(f"{folder}/")[2]: value for key, value in found}

    def increment(self, key: str) -> int:
        """Add one to a count."""
        count: int = self._call(self._client.key_value_increment, key, 1)
        return count

    def delete(self, folder: str) -> None:
        """Delete all keys below a folder."""
        self._call(self._client.key_value_delete, f"{folder}/")

    def _call(self, call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except jax.errors.JaxRuntimeError as error:
            if str(error).startswith(("DEADLINE_EXCEEDED", "NOT_FOUND")):
                return None
            raise CheckpointError(
                f"JAX's coordination service, through which the processes of this job communicate, failed: {error}"
            ) from error


def current() -> Coordinator:
    """Return the coordinator of this job, the same one at every call."""
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return Coordinator()
    from jax._src.distributed import global_state

    return _coordinators.get(global_state.client)


def coordinator_host() -> str | None:
    """The address of the host whose process 0 runs the coordination service; None: a single process."""
    if current().processes == 1:
        return None
    from jax._src.distributed import global_state

    address = global_state.coordinator_address
    return None if address is None else str(address).rpartition(":")[0].strip("[]")


class PreemptionService:
    """JAX's own preemption service: it notices a SIGTERM of any process and lets all of them stop at one point.

    It compares a number that every process passes at every point. This class passes the number of calls, because a
    number that jumps, such as a step, may never match.
    """

    def __init__(self, client: Any, manager: Any) -> None:
        self._client, self._manager = client, manager
        self._calls, self._is_reached = 0, False

    def is_reached(self) -> bool:
        """Return whether all processes stop, from one call on. All of them make the same calls, in one order."""
        self._calls += 1
        self._is_reached = self._is_reached or bool(self._manager.reached_sync_point(self._calls))
        return self._is_reached

    def noticed_before_s(self) -> float:
        """Return how many seconds ago the signal was noticed, by the clocks of two machines; 0 if unknown."""
        try:
            notice_time = re.sub(r"(\.\d{6})\d+", r"\1", self._client.key_value_try_get(_NOTICE_KEY))
            noticed = datetime.datetime.fromisoformat(notice_time)  # reads six decimals
        except (jax.errors.JaxRuntimeError, ValueError):
            return 0.0
        return max(0.0, time.time() - noticed.timestamp())


def preemption_service() -> PreemptionService | None:
    """Return the service of this job, the same one at every call; None: a single process, or no service."""
    if current().processes == 1:
        return None
    from jax._src.distributed import global_state

    return None if global_state.preemption_sync_manager is None else _services.get(global_state)


_coordinators = PerProcess[Any, Coordinator](
    lambda client: ManyProcesses(JaxKeyValues(client), jax.process_index(), jax.process_count())
)
_services = PerProcess[Any, PreemptionService](
    lambda state: PreemptionService(state.client, state.preemption_sync_manager)
)
