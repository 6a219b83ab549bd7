"""Send a process frames that its peer has not sent: `python -m tests.nightly.tiers.frames [--frames 1000000]`.

Frames are changed, cut, sent twice, taken from other connections, made with another token, or claim to be large. Each
must be refused before more is read than a frame may have. Every thousandth frame is left whole, and must be accepted.
"""

from __future__ import annotations

import argparse
import random
import socket
import struct
import sys
import threading
from collections import Counter

import numpy as np

from jaxckpt_train.store.backends import peers
from jaxckpt_train.store.backends.peers import Connection, FrameError

TOKEN = b"t" * 32
MOST_READ_BYTES = peers.MAX_BODY_BYTES + peers.MAX_PAYLOAD_BYTES + 1024


class Link:
    """A socket in memory: what was sent, and what is received."""

    def __init__(self) -> None:
        self.sent, self.coming, self.at = list[bytes](), b"", 0

    def sendall(self, data: bytes) -> None:
        self.sent.append(bytes(data))

    def recv_into(self, view: memoryview) -> int:
        part = self.coming[self.at : self.at + len(view)]
        view[: len(part)] = part
        self.at += len(part)
        return len(part)


def pair(token: bytes = TOKEN) -> tuple[Connection, Connection]:
    """Two sides of a connection, with links in memory after the handshake."""
    one, other = socket.socketpair()
    made = list[Connection]()
    thread = threading.Thread(target=lambda: made.append(Connection(other, token, is_server=True)))
    thread.start()
    client = Connection(one, token, is_server=False)
    thread.join()
    for side in (client, made[0]):
        side._link = Link()  # type: ignore[assignment]
    one.close()
    other.close()
    return client, made[0]


def frame_of(connection: Connection, chosen: random.Random) -> tuple[bytes, int]:
    """A frame that a side sends, and the number of bytes of its payload."""
    link = connection._link
    assert isinstance(link, Link)
    link.sent.clear()
    size = chosen.choice([0, 0, 1, 7, 4096])
    payload = np.frombuffer(chosen.randbytes(size), np.uint8) if size else None
    path = "x" * chosen.randrange(1, 200)
    connection.send(chosen.randrange(1, 3), peers._Request(path, chosen.randrange(1 << 40), size), payload)
    return b"".join(link.sent), size


def damaged(frame: bytes, others: list[bytes], chosen: random.Random) -> tuple[str, bytes]:
    """A frame that must be refused, and how it was made."""
    kind = chosen.choice(["flip", "cut", "claim", "noise", "other", "insert", "swap"])
    at = chosen.randrange(len(frame))
    if kind == "flip":
        return kind, frame[:at] + bytes([frame[at] ^ 1 << chosen.randrange(8)]) + frame[at + 1 :]
    if kind == "cut":
        return kind, frame[:at]
    if kind == "claim":
        body, payload = chosen.choice([(1 << 32) - 1, 1 << 20, 65537]), chosen.choice([(1 << 32) - 1, 1 << 30, 1 << 23])
        return kind, frame[:13] + struct.pack(">II", body, payload) + frame[21:]
    if kind == "noise":
        return kind, frame[:4] + chosen.randbytes(len(frame) - 4)
    if kind in ("insert", "swap"):
        low, high = sorted((at, chosen.randrange(len(frame))))
        changed = frame[:low] + frame[high:] + frame[low:high]
        if kind == "insert":
            changed = frame[:at] + chosen.randbytes(1) + frame[at:]
        return (kind, changed) if changed[: len(frame)] != frame else ("cut", frame[:-1])
    return kind, chosen.choice(others)


def campaign(frames: int, seed: int) -> Counter[str]:
    """Send frames, and count them by kind.

    Raises:
        AssertionError: a frame was wrongly accepted or refused, or too much was read.
    """
    chosen, counts = random.Random(seed), Counter[str]()
    client, server = pair()
    strangers = [pair(b"u" * 32)[0], *(pair()[0] for _ in range(20)), server]
    others = [frame_of(each, chosen)[0] for each in strangers for _ in range(20)]
    for number in range(frames):
        link, before = server._link, (client._sent, server._seen)
        assert isinstance(link, Link)
        frame, size = frame_of(client, chosen)
        kind, link.coming = ("whole", frame) if number % 1000 == 0 else damaged(frame, others, chosen)
        link.at, into = 0, np.zeros(size, np.uint8) if size else None
        try:
            server.receive(into)
            is_accepted = True
            others.append(frame)  # sent before from now on
            del others[:-2000]
        except FrameError:
            is_accepted = False
            client._sent, server._seen = before
        assert is_accepted == (kind == "whole"), f"frame {number}, {kind}"
        assert link.at <= MOST_READ_BYTES
        counts[kind] += 1
    return counts


def main() -> None:
    """Print what was sent."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    counts = campaign(options.frames, options.seed)
    sys.stdout.write(f"{options.frames} frames, seed {options.seed}: {dict(counts)}; only whole ones accepted\n")


if __name__ == "__main__":
    main()
