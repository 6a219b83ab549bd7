"""The progress line: shown at a terminal, and silent elsewhere."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from jaxckpt_train.inspection.units import progress_line, wants_progress


class Terminal(io.StringIO):
    """A standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_line_is_wanted_where_there_is_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not wants_progress("auto")
    assert wants_progress(True)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert wants_progress("auto")
    assert not wants_progress(False)
    monkeypatch.setattr(sys, "stderr", None)
    assert not wants_progress("auto")


def test_nothing_is_shown_unless_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    with progress_line("restoring", 10, shown=False) as advance:
        assert advance is None
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("total", [1000, None])
def test_progress_line_leaves_standard_output_alone(total: int | None, capfd: pytest.CaptureFixture[str]) -> None:
    with progress_line("restoring", total, shown=True) as advance:
        assert advance is not None
        threads = [threading.Thread(target=advance, args=(100,)) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert capfd.readouterr().out == ""


def test_progress_line_passes_errors_through() -> None:
    with pytest.raises(ValueError, match="own"), progress_line("restoring", 10, shown=True):
        raise ValueError("own")
