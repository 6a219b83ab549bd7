"""Parity over the files of several processes: XOR survives the loss of one of them, P and Q the loss of two.

The files of each member of a set are one stream of bytes, padded with zeros. The streams are cut into as many chunks as
there are members that can hold them apart from their parity: stripe `s` has its P at member `s`, and its Q at member
`s + 1`; each other member contributes one chunk. So each member holds its own files, and parity of 1 / (members - 1) of
that size, or 2 / (members - 2) with Q, as in RAID 5 and RAID 6.

P is the sum of the chunks in GF(2^8), which is XOR, and Q the sum of the chunks, each times 2 to the power of its
member's place (H. P. Anvin, "The mathematics of RAID-6", 2004). All is computed with numpy on 8 bytes at a time; only
the rebuild of two chunks multiplies by other constants, with a table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError

Kind = Literal["xor", "p+q"]
Reader = Callable[[int, np.ndarray], None]  # fills the array from this offset of a chunk or a parity on
MOST_MEMBERS = 255
WINDOW_BYTES = 1 << 20
"""Parity is computed and rebuilt in windows of this size: each takes about 4 of them in memory."""
_PAGE = 4096
_CACHED_WORDS = 8 << 10  # 64 KiB: the operands of a product stay in the cache of the processor
_POLYNOMIAL = 0x1D
_HIGH, _LOW = np.uint64(0x8080808080808080), np.uint64(0x7F7F7F7F7F7F7F7F)


class Stripes(NamedTuple):
    """How the streams of a set are cut.

    Attributes:
        kind: "xor": P only; "p+q": also Q.
        sizes: the number of bytes of each member's stream.
    """

    kind: Kind
    sizes: tuple[int, ...]

    @property
    def chunk_bytes(self) -> int:
        """The size of each chunk, and of each parity."""
        longest, chunks = max(self.sizes), len(self.sizes) - self.parities
        return -(-longest // chunks // _PAGE) * _PAGE if longest else 0

    @property
    def parities(self) -> int:
        """How many parities a stripe has: the number of members that may be lost."""
        return 1 if self.kind == "xor" else 2

    def holders(self, stripe: int) -> tuple[int, ...]:
        """The members that hold P, and Q if there is one, of a stripe."""
        return tuple((stripe + number) % len(self.sizes) for number in range(self.parities))

    def held_by(self, member: int) -> list[tuple[Literal["p", "q"], int]]:
        """The parities that a member holds, each with its stripe."""
        held: list[tuple[Literal["p", "q"], int]] = [("p", member), ("q", (member - 1) % len(self.sizes))]
        return held[: self.parities]

    def contributors(self, stripe: int) -> list[int]:
        """The members with a chunk in a stripe."""
        holders = self.holders(stripe)
        return [member for member in range(len(self.sizes)) if member not in holders]

    def offset(self, member: int, stripe: int) -> int:
        """Where the chunk of a member in a stripe starts in its stream."""
        before = [each for each in range(stripe) if member not in self.holders(each)]
        return len(before) * self.chunk_bytes

    def chunk_at(self, member: int, offset: int) -> tuple[int, int]:
        """The stripe of a byte of a member's stream, and its offset in the chunk."""
        stripes = [each for each in range(len(self.sizes)) if member not in self.holders(each)]
        return stripes[offset // self.chunk_bytes], offset % self.chunk_bytes

    def length(self, member: int, stripe: int) -> int:
        """How many bytes a member really has in its chunk of a stripe; zeros follow."""
        return min(max(0, self.sizes[member] - self.offset(member, stripe)), self.chunk_bytes)


def add(total: np.ndarray, data: np.ndarray) -> None:
    """Add bytes to a sum of at least as many."""
    part = total[: len(data)]
    np.bitwise_xor(part, data, out=part)


def double(words: np.ndarray, scratch: np.ndarray) -> None:
    """Multiply each byte of an array of uint64 by 2 in GF(2^8); `scratch` is an array of the same size."""
    for at in range(0, len(words), _CACHED_WORDS):
        part = words[at : at + _CACHED_WORDS]
        high = scratch[: len(part)]
        np.bitwise_and(part, _HIGH, out=high)
        np.bitwise_and(part, _LOW, out=part)
        np.left_shift(part, 1, out=part)
        np.right_shift(high, 7, out=high)
        np.multiply(high, _POLYNOMIAL, out=high)
        np.bitwise_xor(part, high, out=part)


def parity_windows(
    stripes: Stripes, stripe: int, which: Literal["p", "q"], chunk_of: Callable[[int], Reader]
) -> Iterator[np.ndarray]:
    """Compute a parity of a stripe, window by window; `chunk_of` reads the chunk of a member in this stripe."""
    readers = {member: chunk_of(member) for member in stripes.contributors(stripe)}
    for at in range(0, stripes.chunk_bytes, WINDOW_BYTES):
        size = min(WINDOW_BYTES, stripes.chunk_bytes - at)
        yield _sum(stripes, stripe, which, readers, at, size)


def _sum(
    stripes: Stripes, stripe: int, which: Literal["p", "q"], readers: dict[int, Reader], at: int, size: int
) -> np.ndarray:
    """The sum of the chunks of these members, from this offset on."""
    total, data = _zeros(size), np.empty(size, np.uint8)
    scratch = np.empty(min(size // 8 + 1, _CACHED_WORDS), np.uint64)
    last = max(readers, default=0)
    for member in range(last, -1, -1):  # Q by Horner's rule
        if which == "q" and member != last:
            double(_words(total), scratch)
        if member in readers:
            here = min(size, stripes.length(member, stripe) - at)
            if here > 0:
                readers[member](at, data[:here])
                add(total, data[:here])
    return total[:size]


def rebuild(
    stripes: Stripes,
    lost: Collection[int],
    member: int,
    offset: int,
    target: np.ndarray,
    chunk_of: Callable[[int, int], Reader],
    parity_of: Callable[[int, Literal["p", "q"]], Reader],
) -> None:
    """Fill a flat uint8 array with bytes of the stream of a lost member, from this offset on.

    `lost` are all members whose files cannot be read. `chunk_of` reads the chunk of a member in a stripe, and
    `parity_of` a parity of a stripe. Raises CorruptCheckpointError: too many members are lost; and their errors.
    """
    done = 0
    while done < len(target):
        stripe, start = stripes.chunk_at(member, offset + done)
        size = min(len(target) - done, stripes.chunk_bytes - start, WINDOW_BYTES)
        found = _rebuild_window(stripes, stripe, lost, member, start, size, chunk_of, parity_of)
        target[done : done + size] = found
        done += size


def _rebuild_window(
    stripes: Stripes,
    stripe: int,
    lost: Collection[int],
    member: int,
    at: int,
    size: int,
    chunk_of: Callable[[int, int], Reader],
    parity_of: Callable[[int, Literal["p", "q"]], Reader],
) -> np.ndarray:
    holders, contributors = stripes.holders(stripe), stripes.contributors(stripe)
    missing = [each for each in contributors if each in lost]
    names: tuple[Literal["p", "q"], ...] = ("p", "q")
    left = [name for name, holder in zip(names, holders, strict=False) if holder not in lost]
    if len(missing) > len(left):
        raise CorruptCheckpointError(
            f"{len(lost)} of {len(stripes.sizes)} members of a parity set are lost; {stripes.kind} can rebuild "
            f"{stripes.parities}"
        )
    readers = {each: chunk_of(each, stripe) for each in contributors if each not in lost}

    def remainder(which: Literal["p", "q"]) -> np.ndarray:
        """The sum of the missing chunks: the parity less the chunks that are there."""
        total = _sum(stripes, stripe, which, readers, at, size)
        parity = np.empty(size, np.uint8)
        parity_of(stripe, which)(at, parity)
        add(total, parity)
        return total

    if len(missing) == 1:
        return remainder("p") if "p" in left else _times(remainder("q"), _power(-member))
    other = next(each for each in missing if each != member)
    # p = x + y and q = 2^a x + 2^b y, so x = (q + 2^b p) / (2^a + 2^b)
    total = _times(remainder("p"), _power(other))
    add(total, remainder("q"))
    return _times(total, _inverse(_power(member) ^ _power(other)))


def _zeros(size: int) -> np.ndarray:
    """Zero bytes, of which whole words can be used."""
    return np.zeros(-(-size // 8) * 8, np.uint8)


def _words(data: np.ndarray) -> np.ndarray:
    return data.view(np.uint64)


@functools.cache
def _tables() -> tuple[list[int], list[int]]:
    """The powers of 2 in GF(2^8), and their logarithms."""
    powers, logarithms, value = [0] * 255, [0] * 256, 1
    for exponent in range(255):
        powers[exponent], logarithms[value] = value, exponent
        value = (value << 1) ^ (0x100 | _POLYNOMIAL if value & 0x80 else 0)
    return powers, logarithms


def _power(exponent: int) -> int:
    return _tables()[0][exponent % 255]


def _inverse(value: int) -> int:
    return _power(-_tables()[1][value])


def _times(data: np.ndarray, constant: int) -> np.ndarray:
    """The product of bytes with a constant that is not zero."""
    powers, logarithms = _tables()
    shift = logarithms[constant]
    table = np.array([0, *(powers[(logarithms[value] + shift) % 255] for value in range(1, 256))], np.uint8)
    return np.take(table, data)


def stream_reader(sizes: Sequence[int], files: Sequence[Reader]) -> Reader:
    """Read a stream that consists of these files."""

    def read(offset: int, target: np.ndarray) -> None:
        done, start = 0, 0
        for size, file in zip(sizes, files, strict=True):
            here = min(size - (offset + done - start), len(target) - done)
            if here > 0:
                file(offset + done - start, target[done : done + here])
                done += here
            start += size
        if done < len(target):
            raise CorruptCheckpointError(f"the files end after {start} bytes, expected {offset + len(target)}")

    return read
