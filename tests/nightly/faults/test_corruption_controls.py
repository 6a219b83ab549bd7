"""Controls of the damage campaigns: without one protection, they find the matching problem."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from jaxckpt_train.run import catalog, record
from jaxckpt_train.run import directory as run_directory
from jaxckpt_train.run import entry as run_entry
from jaxckpt_train.run.directory import RunDirectory
from jaxckpt_train.run.entry import Entry
from jaxckpt_train.run.record import RecordKeeper, RunRecord
from jaxckpt_train.run.scrubber import Scrubber
from jaxckpt_train.settings import DigestName, StoreSettings
from jaxckpt_train.store import files, manifest, reader, verify
from tests.nightly.crash.explorer import small_sizes
from tests.nightly.faults import corruption, damaged_background, damaged_owners
from tests.nightly.faults.sample_runs import DIGESTS

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with small_sizes():
        yield


def problems_of(campaign: Callable[..., Any], trials: int, **options: Any) -> str:
    return "\n".join(campaign(trials, seed=1, **options).problems)


@pytest.mark.parametrize("digest", DIGESTS)
def test_load_without_digests_is_detected(digest: DigestName) -> None:
    settings = StoreSettings(verify_on_load=False, io_threads=1)
    found = problems_of(corruption.campaign, 100, digests=(digest,), settings=settings)
    assert "loaded in silence, and wrong" in found


def test_digest_with_false_alarms_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, real = itertools.count(1), manifest.digest_function

    def erring(name: str) -> manifest.HexDigest:
        digest = real(name)
        return lambda data: digest(data) if next(calls) % 97 else digest(b"something else")

    for module in (reader, verify, files):
        monkeypatch.setattr(module, "digest_function", erring)
    found = corruption.campaign(120, seed=1)
    assert any(problem.startswith("clean") and "a false alarm: " in problem for problem in found.problems)
    assert any(problem.startswith("clean") and "a false alarm of verify: " in problem for problem in found.problems)


def test_verification_without_headers_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify._FileCheck, "_head_problems", lambda *_: iter(()))
    assert "verify finds nothing" in problems_of(corruption.campaign, 100)


def test_run_without_damage_reports_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunDirectory, "_write_damage_reports", lambda self: None)
    found = problems_of(corruption.campaign, 40)
    assert "not set aside: after the restore there are [1, 2], damaged []" in found


def write_in_memory(self: RecordKeeper, changed: RunRecord) -> None:
    self.record = changed


def test_damage_reports_in_memory_only_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordKeeper, "_write", write_in_memory)
    found = problems_of(corruption.campaign, 40)
    assert "after the restore there are" not in found
    assert "not set aside: the next process finds" in found
    assert "a step that was set aside was tried again" in found


def test_restore_that_retries_damaged_steps_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = RunDirectory.candidates

    def newest_first(self: RunDirectory, step: int | None, **options: Any) -> list[Entry]:
        return sorted(candidates(self, step, **options), key=lambda entry: entry.order, reverse=True)

    monkeypatch.setattr(RunDirectory, "candidates", newest_first)
    found = problems_of(corruption.campaign, 40)
    assert set(kinds_of(found)) == {"a step that was set aside was tried again"}


def test_retention_that_deletes_damaged_steps_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    retain = RunDirectory.retain

    def retain_less(self: RunDirectory) -> None:
        retain(self)
        self._deleter.delete([entry.name for entry in self.damaged()])

    monkeypatch.setattr(RunDirectory, "retain", retain_less)
    assert "a damaged step was changed or deleted" in problems_of(corruption.campaign, 40)
    assert "was deleted or changed" in problems_of(damaged_owners.campaign, 20)


def kinds_of(problems: str) -> Iterator[str]:
    for problem in problems.splitlines():
        yield problem.split(": ", 1)[1]


def test_record_lost_without_notice_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    applied_to = RunRecord.applied_to
    monkeypatch.setattr(RunRecord, "applied_to", lambda self, entry, is_complete=True: applied_to(self, entry))
    monkeypatch.setattr(RecordKeeper, "take", lambda self, found, entries: None)
    assert "the record is lost, and step-" in problems_of(damaged_owners.campaign, 60)


def test_ignored_pins_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    applied_to = RunRecord.applied_to

    def without_pins(self: RunRecord, entry: Entry, is_complete: bool = True) -> Entry:
        return applied_to(msgspec.structs.replace(self, pins=frozenset()), entry, is_complete)

    monkeypatch.setattr(RunRecord, "applied_to", without_pins)
    assert "what must stay is gone: step-0000000001" in problems_of(damaged_owners.campaign, 20)


def test_raw_json_errors_of_record_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "decode_record", lambda data, path: msgspec.json.decode(data, type=RunRecord))
    assert "raised DecodeError" in problems_of(damaged_owners.campaign, 60)


def test_start_that_fails_on_damage_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_committed_info", lambda backend, path: (_certain(backend, path), True))
    found = problems_of(damaged_owners.campaign, 60)
    assert "the run does not go on: /run/step-" in found


def _certain(backend: Any, path: str) -> dict[str, Any]:
    found = catalog.read_committed(backend, path)
    assert found is not None
    return catalog._info_of(found[0], path)


def test_forgotten_roll_back_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (run_entry, run_directory):
        monkeypatch.setattr(module, "left_behind", lambda *_: frozenset())
    assert "what must stay is gone: step-0000000003" in problems_of(damaged_owners.campaign, 20)


def test_background_that_ignores_neighbours_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Scrubber._judge

    def judge_alone(self: Scrubber, *what: Any) -> None:
        judge(self, *what)
        self._suspects.clear()

    monkeypatch.setattr(Scrubber, "_judge", judge_alone)
    assert "were not next, but" in problems_of(damaged_background.campaign, 20)


def test_background_that_sets_nothing_aside_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunDirectory, "set_aside", lambda *_: None)
    assert "set aside in the background are []" in problems_of(damaged_background.campaign, 10)


def test_unchanged_package_has_no_problems() -> None:
    assert not logging.getLogger("jaxckpt_train").isEnabledFor(logging.WARNING)
    for campaign, trials in (
        (corruption.campaign, 120),
        (damaged_owners.campaign, 60),
        (damaged_background.campaign, 20),
    ):
        assert problems_of(campaign, trials) == ""
