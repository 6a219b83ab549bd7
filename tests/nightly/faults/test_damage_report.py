"""The tables of a damage campaign count noticed damage, missed damage and false alarms."""

from __future__ import annotations

from tests.nightly.faults.damage_report import CLEAN, UNCHANGED, Found, Trial, tables


def rows_of(found: Found) -> dict[str, list[str]]:
    """Return the rows of all tables by their first cell."""
    lines = [line.strip("| ").split(" | ") for line in tables(found).split("\n") if line.startswith("| ")]
    return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}


def test_trials_are_counted_in_each_table() -> None:
    found = Found()
    for count, trial in (
        (3, Trial("flip", "byte", "sha256", "load", "segment: digest of a block")),
        (1, Trial("flip", "file", "blake3", "load", "segment: digest of a block")),
        (2, Trial("flip", "file", "sha256", "verify", "segment: digest of the header")),
        (4, Trial("zero", "byte", "sha256", None, UNCHANGED)),
        (5, Trial(CLEAN, "byte", "sha256", None, UNCHANGED)),
    ):
        found.trials[trial] = count
    rows = rows_of(found)
    assert rows["segment: digest of a block"] == ["3", "1"]  # the table by digest comes last
    assert rows["segment: digest of the header (verify only)"][0] == "0 / 2"
    assert rows[UNCHANGED][:2] == ["", "4 / 0"]
    assert rows["chosen by byte"] == ["7", "4", "3", "3", "0", "all", "0 of 5"]
    assert rows["blake3"] == ["1", "0", "1", "1", "0", "all", "0 of 0"]
    assert rows["all"] == ["10", "4", "6", "4", "2", "all", "0 of 5"]


def test_tables_show_missed_damage_and_false_alarms() -> None:
    found = Found()
    found.trials[Trial("flip", "byte", "sha256", None, "nothing noticed it")] = 1
    found.trials[Trial("flip", "byte", "sha256", "load", "value: digest")] = 3
    found.trials[Trial(CLEAN, "byte", "sha256", "load", "value: digest")] = 1
    found.trials[Trial("flip", "byte", "blake3", "load", "value: digest")] = 999_999
    found.trials[Trial("flip", "byte", "blake3", None, "nothing noticed it")] = 1
    rows = rows_of(found)
    assert rows["blake3"][-2] == "99.999 %"
    assert rows["nothing noticed it"][0] == "2 / 0"
    assert rows["sha256"] == ["4", "0", "4", "3", "0", "75.0 %", "1 of 1"]
