"""JAX's distributed runtime as a key-value store: the only place that touches jax.distributed and its private names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jaxckpt_train.coordinator import Coordinator, ManyProcesses, SingleProcess
from jaxckpt_train.errors import CheckpointError
from jaxckpt_train.store.per_process import PerProcess


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


def one_process() -> Coordinator:
    """The coordinator of a job of one process.

    Raises:
        CheckpointError: the job has several, which this version cannot let save the steps of a run together.
    """
    found = current()
    if found.processes > 1:
        raise CheckpointError(
            f"this job has {found.processes} processes; in this version of jaxckpt_train the steps of a run are saved "
            "by jobs of one process (with any number of devices). Single checkpoints are saved and loaded by all "
            "processes together: jaxckpt_train.save, jaxckpt_train.load"
        )
    return found


def _made(client: Any) -> Coordinator:
    return ManyProcesses(JaxKeyValues(client), jax.process_index(), jax.process_count())


_of_client: PerProcess[Any, Coordinator] = PerProcess(_made)
