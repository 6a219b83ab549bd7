"""Each kind of damage has its effect on the chosen file."""

from __future__ import annotations

import random

import pytest

from tests.nightly.faults.damages import KINDS, Files, Victim, chosen

NAMES = ["/a.json", "/b.safetensors", "/c.safetensors", "/d.safetensors"]
FILES = {name: name.encode() * 100 for name in NAMES}
OLDER = {name: b"older " + name.encode() for name in NAMES}


def damaged(kind: str, name: str, seed: int, names: list[str] = NAMES) -> Files:
    files = dict(FILES)
    KINDS[kind](files, Victim(name, names, OLDER, random.Random(seed)))
    return files


def different(files: Files) -> set[str]:
    return {name for name in FILES if files.get(name) != FILES[name]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES[:2])
def test_each_damage_changes_the_chosen_file(kind: str, name: str) -> None:
    for seed in range(50):
        changed = different(damaged(kind, name, seed))
        assert name in changed
        assert len(changed) == (2 if kind == "swap" else 1)


@pytest.mark.parametrize("kind", ["swap", "duplicate"])
def test_segment_is_swapped_with_another_segment(kind: str) -> None:
    contents = {damaged(kind, NAMES[1], seed)[NAMES[1]] for seed in range(50)}
    assert contents == {FILES[NAMES[2]], FILES[NAMES[3]]}
    assert damaged(kind, NAMES[1], 0, NAMES[:2])[NAMES[1]] == FILES[NAMES[0]]


def test_each_kind_of_damage_has_its_effect() -> None:
    name, whole = NAMES[0], FILES[NAMES[0]]
    for seed in range(50):
        after = {kind: damaged(kind, name, seed).get(name) for kind in KINDS}
        one_bit = int.from_bytes(after["flip"] or b"") ^ int.from_bytes(whole)
        assert one_bit.bit_count() == 1
        left = (after["zero"] or b"").partition(b"\0")
        assert left[2].strip(b"\0") in whole
        assert whole.startswith(left[0])
        assert len(after["zero"] or b"") == len(whole)
        assert whole.startswith(after["truncate"] or b"")
        assert (after["extend"] or b"").startswith(whole)
        assert after["duplicate"] in [FILES[other] for other in NAMES[1:]]
        assert (after["missing"], after["stale"]) == (None, OLDER[name])


def test_files_are_chosen_by_size_or_evenly() -> None:
    files, chance = {"/small": b"x", "/large": b"x" * 999}, random.Random(0)
    by_bytes, by_file = ([chosen(files, list(files), by, chance) for _ in range(1000)] for by in (True, False))
    assert by_bytes.count("/small") < 10
    assert 400 < by_file.count("/small") < 600
