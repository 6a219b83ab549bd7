"""Mailboxes: messages arrive whole, in order, at the right process; no wait is longer than its limit."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxckpt_train.distributed.shared_memory import MESSAGE_BYTES, Channel, Mailbox

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pipes are found under /proc on Linux alone"),
    pytest.mark.timeout(120),
]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_who_hears_nothing_waits_as_long_as_asked() -> None:
    mailbox = Mailbox()
    for timeout_s in (0, 0.2):
        began = time.monotonic()
        assert mailbox.receive(timeout_s) == []
        assert timeout_s - 0.01 <= time.monotonic() - began < 30
    Channel(mailbox.address).send(b"here")
    began = time.monotonic()
    assert mailbox.receive(90) == [b"here".ljust(MESSAGE_BYTES, b"\0")]
    assert time.monotonic() - began < 30
    mailbox.close()


def test_a_full_mailbox_refuses_more_and_loses_nothing() -> None:
    mailbox = Mailbox()
    letters, sent = Channel(mailbox.address), 0
    with pytest.raises(BlockingIOError):
        while sent < 1 << 20:
            letters.send(sent.to_bytes(MESSAGE_BYTES, "big"))
            sent += 1
    heard = [message for _ in range(1 + sent // 1024) for message in mailbox.receive(0)]
    assert heard == [number.to_bytes(MESSAGE_BYTES, "big") for number in range(sent)]
    letters.send(b"again")
    assert len(mailbox.receive(0)) == 1
    letters.close()
    mailbox.close()


def test_after_its_close_nothing_is_written_to_a_file_that_has_its_number(tmp_path: Path) -> None:
    mailbox = Mailbox()
    with open(tmp_path / "file", "wb", buffering=0) as file:
        for _ in range(100):
            letters, ends, sends = Channel(mailbox.address), threading.Event(), threading.Event()
            number = letters._descriptor
            assert number is not None
            thread = threading.Thread(target=keep_sending, args=(letters, sends, ends))
            thread.start()
            assert sends.wait(60)
            letters.close()
            os.dup2(file.fileno(), number)
            letters.send(b"to nobody")
            ends.set()
            thread.join()
            os.close(number)
            while mailbox.receive(0):
                pass
    letters.close()
    mailbox.close()
    assert (tmp_path / "file").read_bytes() == b""


def keep_sending(letters: Channel, sends: threading.Event, ends: threading.Event) -> None:
    while not ends.is_set():
        with contextlib.suppress(BlockingIOError):
            letters.send(b"by another thread")
        sends.set()
    letters.send(b"the last one")


def test_all_descriptors_are_closed() -> None:
    before = descriptors()
    mailboxes = [Mailbox() for _ in range(5)]
    letters = [Channel(mailbox.address) for mailbox in mailboxes]
    assert descriptors() == before + 15
    for letter, mailbox in zip(letters, mailboxes, strict=True):
        letter.close()
        mailbox.close()
    assert descriptors() == before
