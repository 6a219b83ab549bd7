"""The identity of a process from /proc, for any process name."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxckpt_train.store import process_identity


def test_process_name_may_be_invalid_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel cuts names after 15 bytes, possibly in the middle of a character."""
    (tmp_path / "stat").write_bytes(b"7 (\xd0\xbe\xd0\xb1\xd1) S 1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4242 1 1")
    monkeypatch.setattr(
        process_identity, "Path", lambda path: tmp_path / "stat" if path.endswith("/stat") else Path(path)
    )
    assert process_identity._stat_of(7)[0] == "S"
    assert process_identity.process_tag()
