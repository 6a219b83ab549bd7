"""`snapshot="auto"` for device arrays: a copy on the device if there is room, else transfers to the host."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxckpt_train.pytree import copies
from jaxckpt_train.pytree.copies import TransferBudget, take_from_devices

MIB = 1 << 20


@pytest.mark.parametrize("room", ["there is", "there is none", "there is none after all"])
def test_auto_copies_on_devices_only_with_room(room: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copied, ordered = list[Any](), list[Any]()
    copy_on_devices, start_transfers = copies.copy_on_devices, copies.start_transfers

    def copy(leaves: Any) -> Any:
        copied.append(leaves)
        if room == "there is none after all":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return copy_on_devices(leaves)

    def start(handles: Any) -> Any:
        ordered.append(handles)
        return start_transfers(handles)

    monkeypatch.setattr(copies, "have_room", lambda leaves: room != "there is none")
    monkeypatch.setattr(copies, "copy_on_devices", copy)
    monkeypatch.setattr(copies, "start_transfers", start)
    content = np.random.default_rng(0).random((256, 1024), np.float32)
    array = jnp.array(content)
    chunks, transfers = take_from_devices([array], "auto", TransferBudget(MIB))
    assert (len(copied), len(ordered)) == {"there is": (1, 0), "there is none": (0, 1)}.get(room, (1, 1))
    jax.block_until_ready(jax.jit(lambda old: old * 0 - 1, donate_argnums=0)(array))
    ((chunk,),) = chunks
    data = chunk.data if isinstance(chunk.data, np.ndarray) else chunk.data.fetch()
    assert data.tobytes() == content.tobytes()
    transfers.close()
