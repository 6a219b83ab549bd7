"""Quantities as text with readable units."""

from __future__ import annotations

import datetime
import math

import pytest

from jaxckpt_train.inspection.units import (
    age_text,
    bytes_text,
    clipped,
    counted,
    number_text,
    rate_text,
    scaled_bytes,
    seconds_text,
    time_text,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""), (0, "0 s"), (2e-6, "2 µs"), (0.0123, "12.3 ms"), (1.5, "1.5 s"), (59.9, "59.9 s"),
        (59.97, "1 min 00 s"), (3599.4, "59 min 59 s"), (3600, "1 h 00 min"), (86400, "24 h 00 min"),
        (200_000, "2 d 07 h"),
    ],
)  # fmt: skip
def test_durations_have_readable_units(seconds: float | None, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(None, ""), (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 30, "3.0 GiB"), (5 << 50, "5120.0 TiB")],
)
def test_bytes_and_rates_have_binary_units(nbytes: int | None, text: str) -> None:
    assert bytes_text(nbytes) == text
    assert rate_text(nbytes) == (f"{text}/s" if text else "")
    if nbytes is not None:
        size, unit = scaled_bytes(nbytes)
        assert text.endswith(unit)
        assert size * 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit) == nbytes


def test_times_numbers_and_nouns_are_readable() -> None:
    zone = datetime.timezone(datetime.timedelta(hours=2))
    assert time_text(datetime.datetime(2026, 3, 1, 1, 2, 3, tzinfo=zone)) == "2026-02-28 23:02:03"
    assert (time_text(None), number_text(None), number_text(math.nan), number_text(1 / 3)) == (
        "",
        "",
        "nan",
        "0.333333",
    )
    assert (counted(1, "leaf", "leaves"), counted(1200, "leaf", "leaves"), counted(0, "step")) == (
        "1 leaf", "1,200 leaves", "0 steps"
    )  # fmt: skip
    assert (clipped("abc", 3), clipped("abcd", 3)) == ("abc", "abc...")


def test_ages_have_their_largest_unit() -> None:
    assert [age_text(age) for age in (-5, 0, 119, 120, 7199, 7200, 172800)] == [
        "0 s", "0 s", "119 s", "2 min", "120 min", "2 h", "2 d",
    ]  # fmt: skip
