"""A child that is forked while another thread of its parent decodes a checkpoint has its own loads."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train import checkpoint_metadata
from jaxckpt_train.checkpointables import loading
from tests.support.forking import Tell, forked

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:.*fork")]


@pytest.mark.parametrize(("module", "step"), [(loading, "TreeRestore"), (checkpoint_metadata, "_describe_part")])
def test_forked_child_loads_and_reads_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, step: str
) -> None:
    jct.save(tmp_path / "c", {"w": np.arange(3)})
    inside, go, parent, real = threading.Event(), threading.Event(), os.getpid(), getattr(module, step)

    def held(*arguments: Any) -> Any:
        if os.getpid() == parent:
            inside.set()
            assert go.wait(60)
        return real(*arguments)

    def read() -> list[Any]:
        return [jct.load(tmp_path / "c")["w"].tolist(), jct.metadata(tmp_path / "c").checkpointables["state"].bytes]

    def work(tell: Tell) -> None:
        tell("read", read())

    monkeypatch.setattr(module, step, held)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert inside.wait(60)
        assert forked(work, longest_s=10) == ([("read", [[0, 1, 2], 24])], 0)
    finally:
        go.set()
        reader.join()
