"""A short campaign of hostile frames."""

from __future__ import annotations

from tests.nightly.tiers.frames import campaign


def test_hostile_frames_are_refused() -> None:
    counts = campaign(20_000, 5)
    assert counts["whole"] == 20
    assert len(counts) == 8
