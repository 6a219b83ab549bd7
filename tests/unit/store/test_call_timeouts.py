"""Questions to disks that do not answer: what is answered when nobody waits any more is undone, and there are few."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from jaxckpt_train.errors import CheckpointTimeoutError
from jaxckpt_train.store import timeouts as answers
from jaxckpt_train.store.timeouts import BackgroundCall, call_with_timeout

pytestmark = pytest.mark.timeout(120)


class Disk:
    """Answers its own number of the question, once it `answers`."""

    def __init__(self) -> None:
        self.answers, self.was_undone = threading.Event(), threading.Event()
        self.asked, self.undone = 0, list[tuple[int, str]]()

    def ask(self, moved: Callable[[], None]) -> int:
        self.asked += 1
        assert self.answers.wait(60)
        return self.asked

    def undo(self, answer: int) -> None:
        self.undone.append((answer, threading.current_thread().name))
        self.was_undone.set()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    monkeypatch.setattr(answers, "POLL_S", 0.02)
    made = Disk()
    yield made
    made.answers.set()


def leave(done: int) -> None:
    raise ZeroDivisionError("somebody is asked to leave")


def test_an_answer_that_comes_too_late_is_undone(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "GIVE_UP_S", 0.05)
    with pytest.raises(CheckpointTimeoutError, match="has not responded"):
        call_with_timeout("a", disk.ask, undo=disk.undo)
    assert disk.undone == []
    disk.answers.set()
    assert disk.was_undone.wait(30)
    assert disk.undone == [(1, "jaxckpt-ask")]


def test_so_is_that_to_who_has_left(disk: Disk) -> None:
    with pytest.raises(ZeroDivisionError):
        call_with_timeout("a", disk.ask, leave, undo=disk.undo)
    disk.answers.set()
    assert disk.was_undone.wait(30)


def test_one_that_is_there_already_is_undone_once_and_on_another_thread(disk: Disk) -> None:
    disk.answers.set()
    question = BackgroundCall(disk.ask, disk.undo)
    question.run()
    question.is_done.open()  # as its thread does
    answers.abandon_call(question)
    assert disk.was_undone.wait(30)
    question.undo()
    assert disk.undone == [(1, "jaxckpt-ask")]


def test_one_that_is_taken_is_not_undone(disk: Disk) -> None:
    disk.answers.set()
    assert call_with_timeout("a", disk.ask, leave, undo=disk.undo) == 1
    assert disk.undone == []


def test_of_a_disk_that_stays_away_no_more_is_asked_after_a_while(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    there = answers._threads.get(None).abandoned_count()
    monkeypatch.setattr(answers, "MAX_ABANDONED", there + 3)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            call_with_timeout("a", disk.ask, leave)
    for _ in range(3):
        with pytest.raises(CheckpointTimeoutError, match=r"^b: .* \d+ earlier storage calls"):
            call_with_timeout("b", disk.ask)
    assert disk.asked == 3
    questions = list(answers._threads.get(None)._abandoned)
    disk.answers.set()
    for question in questions:
        assert question.is_done.wait(30)
    assert call_with_timeout("c", disk.ask) == 4


def test_failed_undo_is_logged_and_frees_its_slot(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(answers, "GIVE_UP_S", 0.05)
    monkeypatch.setattr(answers, "MAX_ABANDONED", 1)

    def fail(answer: int) -> None:
        disk.was_undone.set()
        raise MemoryError("of an undo")

    with pytest.raises(CheckpointTimeoutError, match="has not responded"):
        call_with_timeout("a", disk.ask, undo=fail)
    (question,) = answers._threads.get(None)._abandoned
    disk.answers.set()
    assert disk.was_undone.wait(60)
    assert question.is_done.wait(60)
    assert call_with_timeout("b", lambda _: 7) == 7
    assert "of an undo" in caplog.text
