"""Mailboxes between real processes: messages arrive whole, in order, and at the right process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxckpt_train.distributed.shared_memory import MESSAGE_BYTES, Channel, Mailbox
from tests.support.addresses import changed
from tests.support.paths import REPO_ROOT

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pipes are found under /proc on Linux alone"),
    pytest.mark.timeout(120),
]

SEND = """
import sys
from jaxckpt_train.distributed.shared_memory import MESSAGE_BYTES, Channel
channel, sender, count = Channel(bytes.fromhex(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
for number in range(count):
    message = bytes([sender]) + number.to_bytes(4, "big") + bytes([number % 251 + 1]) * (MESSAGE_BYTES - 5)
    while True:
        try:
            channel.send(message)
            break
        except BlockingIOError:
            pass
"""
BE_THERE = """
import sys
from jaxckpt_train.distributed.shared_memory import Mailbox
mailbox = Mailbox()
print(mailbox.address.hex(), flush=True)
sys.stdin.read()
"""
ANOTHER_PIPE = """
import os, sys
os.dup2(0, int(sys.argv[1]))
print("there", flush=True)
sys.stdin.read()
"""


def started(script: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a process that ends when its input is closed."""
    root = REPO_ROOT
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )


def named_pipe_without_reader(path: Path) -> int:
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writing = os.open(path, os.O_WRONLY)
    os.close(reading)
    return writing


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_messages_of_processes_arrive_whole_and_ordered(run_python: Any) -> None:
    senders, count = 3, 5000  # more than a pipe takes at a time
    next_of = [0] * senders
    with ThreadPoolExecutor(senders) as pool, contextlib.closing(Mailbox()) as mailbox:
        each = [
            pool.submit(run_python, SEND, mailbox.address.hex(), str(n), str(count), check=True) for n in range(senders)
        ]
        while sum(next_of) < senders * count:
            for message in mailbox.receive(60):
                sender, number = message[0], int.from_bytes(message[1:5], "big")
                assert number == next_of[sender]
                assert message[5:] == bytes([number % 251 + 1]) * (MESSAGE_BYTES - 5)
                next_of[sender] += 1
        for done in each:
            done.result()
        assert mailbox.receive(0) == []


def test_address_of_other_file_is_refused(tmp_path: Path) -> None:
    mailbox, other, before = Mailbox(), Mailbox(), descriptors()
    pid, own, inode = msgspec.msgpack.decode(mailbox.address)
    with open(tmp_path / "file", "wb") as file, started(ANOTHER_PIPE, str(own)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        writing = named_pipe_without_reader(tmp_path / "pipe")
        nobody_reads = msgspec.msgpack.encode([pid, writing, os.fstat(writing).st_ino])  # a plain open blocks forever
        for address in (
            changed(mailbox.address, 1, msgspec.msgpack.decode(other.address)[1]),
            changed(mailbox.address, 1, file.fileno()),
            changed(mailbox.address, 1, 100_000),
            changed(mailbox.address, 2, inode + 1),
            changed(mailbox.address, 0, 2**31 - 1),
            changed(mailbox.address, 0, process.pid),
            nobody_reads,
        ):
            with pytest.raises(OSError):  # noqa: PT011  # of several kinds
                Channel(address)
        process.communicate()
    os.close(writing)
    assert (tmp_path / "file").read_bytes() == b""
    assert mailbox.receive(0) == other.receive(0) == []
    assert descriptors() == before
    mailbox.close()
    other.close()


def test_messages_to_ended_process_are_dropped() -> None:
    before = descriptors()
    with started(BE_THERE) as process:
        assert process.stdout is not None
        channel = Channel(bytes.fromhex(process.stdout.readline()))
        channel.send(b"while it is there")
        process.communicate()
    for _ in range(3):
        channel.send(b"too late")
    channel.close()
    assert descriptors() == before


SEND_TO_NOBODY = """
import signal
from jaxckpt_train.distributed.shared_memory import Channel, Mailbox
signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the default, which ends a process that writes to a closed pipe
mailbox = Mailbox()
channel = Channel(mailbox.address)
mailbox.close()
channel.send(b"late")
print("alive")
"""


def test_sending_to_closed_mailbox_ends_no_process(run_python: Any) -> None:
    assert run_python(SEND_TO_NOBODY, check=True).stdout == "alive\n"
