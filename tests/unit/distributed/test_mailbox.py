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


def test_receive_waits_until_message_or_timeout() -> None:
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
    channel, sent = Channel(mailbox.address), 0
    with pytest.raises(BlockingIOError):
        while sent < 1 << 20:
            channel.send(sent.to_bytes(MESSAGE_BYTES, "big"))
            sent += 1
    received = [message for _ in range(1 + sent // 1024) for message in mailbox.receive(0)]
    assert received == [number.to_bytes(MESSAGE_BYTES, "big") for number in range(sent)]
    channel.send(b"again")
    assert len(mailbox.receive(0)) == 1
    channel.close()
    mailbox.close()


def test_closed_channel_never_writes_to_reused_descriptor(tmp_path: Path) -> None:
    mailbox = Mailbox()
    with open(tmp_path / "file", "wb", buffering=0) as file:
        for _ in range(100):
            channel, ends, sends = Channel(mailbox.address), threading.Event(), threading.Event()
            number = channel._descriptor
            assert number is not None
            thread = threading.Thread(target=keep_sending, args=(channel, sends, ends))
            thread.start()
            assert sends.wait(60)
            channel.close()
            os.dup2(file.fileno(), number)
            channel.send(b"to nobody")
            ends.set()
            thread.join()
            os.close(number)
            while mailbox.receive(0):
                pass
    channel.close()
    mailbox.close()
    assert (tmp_path / "file").read_bytes() == b""


def keep_sending(channel: Channel, sends: threading.Event, ends: threading.Event) -> None:
    while not ends.is_set():
        with contextlib.suppress(BlockingIOError):
            channel.send(b"by another thread")
        sends.set()
    channel.send(b"the last one")


def test_all_descriptors_are_closed() -> None:
    before = descriptors()
    mailboxes = [Mailbox() for _ in range(5)]
    channels = [Channel(mailbox.address) for mailbox in mailboxes]
    assert descriptors() == before + 15
    for channel, mailbox in zip(channels, mailboxes, strict=True):
        channel.close()
        mailbox.close()
    assert descriptors() == before
