"""Parity against sums that are computed byte by byte, and the rebuild of all that may be lost."""

from __future__ import annotations

import functools
import itertools
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt_train.errors import CorruptCheckpointError
from jaxckpt_train.tiers import parity
from jaxckpt_train.tiers.parity import Kind, Reader, Stripes


def times(one: int, other: int) -> int:
    """The product in GF(2^8), bit by bit."""
    product = 0
    while other:
        product ^= one if other & 1 else 0
        one = (one << 1) ^ (0x11D if one & 0x80 else 0)
        other >>= 1
    return product


class Streams:
    """The streams of a set in memory, with their parities."""

    def __init__(self, kind: Kind, sizes: tuple[int, ...], seed: int) -> None:
        self.stripes = Stripes(kind, sizes)
        random = np.random.default_rng(seed)
        self.streams = [random.integers(0, 256, size, np.uint8) for size in sizes]
        self.lost = set[int]()
        self.parities = {
            (stripe, which): np.concatenate(
                [
                    np.zeros(0, np.uint8),
                    *parity.parity_windows(
                        self.stripes, stripe, which, functools.partial(self.chunk_of, stripe=stripe)
                    ),
                ]
            )
            for member in range(len(sizes))
            for which, stripe in self.stripes.held_by(member)
        }

    def chunk_of(self, member: int, stripe: int) -> Reader:
        assert member not in self.lost

        def read(at: int, target: np.ndarray) -> None:
            start = self.stripes.offset(member, stripe) + at
            target[:] = self.streams[member][start : start + len(target)]

        return read

    def parity_of(self, stripe: int, which: Literal["p", "q"]) -> Reader:
        holder = self.stripes.holders(stripe)["pq".index(which)]
        assert holder not in self.lost

        def read(at: int, target: np.ndarray) -> None:
            target[:] = self.parities[stripe, which][at : at + len(target)]

        return read

    def padded(self, member: int, stripe: int) -> np.ndarray:
        start, width = self.stripes.offset(member, stripe), self.stripes.chunk_bytes
        found = np.zeros(width, np.uint8)
        part = self.streams[member][start : start + width]
        found[: len(part)] = part
        return found

    def rebuilt(self, member: int, offset: int, size: int) -> bytes:
        target = np.full(size, 255, np.uint8)
        parity.rebuild(self.stripes, self.lost, member, offset, target, self.chunk_of, self.parity_of)
        return target.tobytes()


@pytest.mark.parametrize("members", [3, 4, 5, 8])
def test_parities_are_the_sums_of_the_chunks(members: int) -> None:
    sizes = tuple(1000 + 777 * place for place in range(members))
    streams = Streams("p+q", sizes, members)
    table = np.array([[times(one, other) for other in range(256)] for one in range(256)], np.uint8)
    for stripe in range(members):
        p, q = np.zeros(streams.stripes.chunk_bytes, np.uint8), np.zeros(streams.stripes.chunk_bytes, np.uint8)
        factor = 1
        for member in range(members):
            if member in streams.stripes.contributors(stripe):
                p ^= streams.padded(member, stripe)
                q ^= table[factor][streams.padded(member, stripe)]
            factor = times(factor, 2)
        assert np.array_equal(streams.parities[stripe, "p"], p)
        assert np.array_equal(streams.parities[stripe, "q"], q)


@given(
    kind=st.sampled_from(["xor", "p+q"]),
    sizes=st.lists(st.integers(0, 30_000), min_size=3, max_size=8),
    seed=st.integers(0, 100),
    data=st.data(),
)
def test_what_is_lost_is_rebuilt(kind: Kind, sizes: list[int], seed: int, data: st.DataObject) -> None:
    streams = Streams(kind, tuple(sizes), seed)
    most = streams.stripes.parities
    streams.lost = set(data.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=most, unique=True)))
    for member in streams.lost:
        offset = data.draw(st.integers(0, sizes[member]))
        size = data.draw(st.integers(0, sizes[member] - offset))
        assert streams.rebuilt(member, offset, size) == streams.streams[member][offset : offset + size].tobytes()


def test_large_streams_are_rebuilt_window_by_window() -> None:
    sizes = (5 * parity.WINDOW_BYTES + 12_345, 3 * parity.WINDOW_BYTES, 10, 6 * parity.WINDOW_BYTES)
    for lost in itertools.combinations(range(4), 2):
        streams = Streams("p+q", sizes, 1)
        streams.lost = set(lost)
        for member in lost:
            assert streams.rebuilt(member, 0, sizes[member]) == streams.streams[member].tobytes()


@pytest.mark.parametrize(("kind", "most"), [("xor", 1), ("p+q", 2)])
def test_more_losses_than_parities_are_refused(kind: Kind, most: int) -> None:
    streams = Streams(kind, (9000, 9000, 9000, 9000), 3)
    streams.lost = set(range(most + 1))
    with pytest.raises(CorruptCheckpointError, match="lost"):
        streams.rebuilt(0, 0, 9000)


def test_parity_takes_the_space_that_it_should() -> None:
    xor, both = Stripes("xor", (7 << 20,) * 8), Stripes("p+q", (6 << 20,) * 8)
    assert [xor.chunk_bytes, len(xor.held_by(3))] == [1 << 20, 1]
    assert [both.chunk_bytes, len(both.held_by(3))] == [1 << 20, 2]
