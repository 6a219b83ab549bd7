"""Mailboxes: what is sent comes, in its order, and to nobody else."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from jaxckpt_train.store.mailbox import MESSAGE_BYTES, Letters, Mailbox

pytestmark = pytest.mark.skipif(not hasattr(os, "pipe2"), reason="no such pipes on this system")

SEND = """
import sys
from jaxckpt_train.store.mailbox import Letters
Letters(bytes.fromhex(sys.argv[1])).send(b"hello")
"""
SEND_TO_NOBODY = """
import signal
from jaxckpt_train.store.mailbox import Letters, Mailbox
signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as in a script that ends when nobody reads its output any more
mailbox = Mailbox()
letters = Letters(mailbox.address)
mailbox.close()
letters.send(b"late")
print("alive")
"""


def padded(message: bytes) -> bytes:
    return message.ljust(MESSAGE_BYTES, b"\0")


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    """One that is open."""
    with contextlib.closing(Mailbox()) as made:
        yield made


def test_another_process_is_heard(mailbox: Mailbox, run_python: Any) -> None:
    run_python(SEND, mailbox.address.hex(), check=True)
    assert mailbox.hear(10.0) == [padded(b"hello")]


def test_a_closed_one_ends_no_process_that_sends_to_it(run_python: Any) -> None:
    assert run_python(SEND_TO_NOBODY, check=True).stdout == "alive\n"


def test_nothing_is_sent_to_a_file_that_has_the_number_of_one_that_is_closed(mailbox: Mailbox) -> None:
    letters = Letters(mailbox.address)
    number = letters._descriptor
    assert number is not None
    reading, writing = os.pipe2(os.O_NONBLOCK)
    letters.close()
    try:
        os.dup2(writing, number)
        letters.send(b"late")
        letters.close()
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)
        os.fstat(number)
    finally:
        for each in {reading, writing, number}:
            os.close(each)


def test_a_full_one_takes_no_part_of_a_message(mailbox: Mailbox) -> None:
    with contextlib.closing(Letters(mailbox.address)) as letters:
        sent = list[bytes]()
        with pytest.raises(BlockingIOError):
            while True:
                letters.send(b"%d" % len(sent))
                sent.append(padded(b"%d" % len(sent)))
        heard = list[bytes]()
        while came := mailbox.hear(0.0):
            heard += came
        assert heard == sent
        letters.send(b"more")
        assert mailbox.hear(0.0) == [padded(b"more")]


def test_another_pipe_is_not_taken_for_it(mailbox: Mailbox) -> None:
    fields = msgspec.msgpack.decode(mailbox.address)
    for place, value in ((1, 10_000), (2, fields[2] + 1), (0, 2**31 - 1)):
        other = [*fields[:place], value, *fields[place + 1 :]]
        with pytest.raises(OSError):  # noqa: PT011  # of several kinds
            Letters(msgspec.msgpack.encode(other))
