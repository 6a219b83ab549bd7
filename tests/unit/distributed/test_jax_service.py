"""The coordinator of a single process; JAX's distributed runtime is not used unless it is initialized."""

from __future__ import annotations

from jaxckpt_train.distributed.coordinator import Coordinator
from jaxckpt_train.distributed.jax_service import current


def test_one_process_agrees_with_itself() -> None:
    coordinator = current()
    assert isinstance(coordinator, Coordinator)
    assert (coordinator.process, coordinator.processes) == (0, 1)
    assert coordinator.exchange("preemption", lambda: b"mine", b"".join) == b"mine"
    assert coordinator.exchange("nothing", lambda: b"mine") == b""
    assert coordinator.broadcast("step", lambda: b"7") == b"7"
    assert coordinator.within("save") is coordinator
    assert not coordinator.has_failed_elsewhere()
    coordinator.exchange("commit", bytes)
    coordinator.end()
