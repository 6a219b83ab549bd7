"""What the processes of a job must save alike: compared as one digest, and one by one to name what differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from jaxckpt_train.checkpointables.saving import StagedPart
from jaxckpt_train.errors import MismatchError
from jaxckpt_train.store.digests import block_digests, digest_function
from jaxckpt_train.store.layout import ChunkSource
from jaxckpt_train.store.manifest import BLOCK_BYTES
from jaxckpt_train.store.writer import WrittenArrays

SHOWN = 5


class Sameness:
    """Of one process.

    Args:
        digest_name: of the checkpoint.
    """

    def __init__(self, digest_name: str) -> None:
        self._digest = digest_function(digest_name)
        self._parts: list[StagedPart] = []
        self._local: dict[str, str] = {}  # by the label of a leaf that each process has for itself

    def add_part(self, part: StagedPart) -> None:
        """What is the same of every kind of checkpointable."""
        self._parts.append(part)

    def add_local(self, part: StagedPart, written: WrittenArrays) -> None:
        """The arrays that each process has for itself, of which `written` are those of this one."""
        assert part.snapshot is not None
        for number in part.snapshot.local:
            array, other = written.arrays[number], part.snapshot.compared.get(number)
            if other is None:
                found = sorted((chunk.box, chunk.digests) for chunk in array.chunks)
            else:
                found = sorted((chunk.box, self._digests(chunk)) for chunk in other if chunk.data.nbytes)
            self._local[f"{part.name}/{array.name}"] = self._digest(msgspec.msgpack.encode(found))

    def _digests(self, chunk: ChunkSource) -> str:
        data = chunk.data.fetch() if hasattr(chunk.data, "fetch") else np.asarray(chunk.data)
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        return block_digests(flat, BLOCK_BYTES, self._digest)

    def of_own_values(self, parts: Sequence[StagedPart]) -> dict[str, str]:
        """What tells whether the values that each process has for itself are equal, by checkpointable."""
        return {part.name: self._digest(part.same) for part in parts if part.same is not None}

    def digest(self) -> str:
        """One of all."""
        return self._digest(msgspec.msgpack.encode(self._all(one_by_one=False)))

    def encoded(self) -> bytes:
        """All one by one, for `refuse_differences`."""
        return msgspec.msgpack.encode(self._all(one_by_one=True))

    def _all(self, *, one_by_one: bool) -> list[tuple[str, str]]:
        found = [each for part in self._parts for each in self._of_part(part, one_by_one=one_by_one)]
        return found + [(f"leaf {name!r}: its values", digest) for name, digest in self._local.items()]

    def _of_part(self, part: StagedPart, *, one_by_one: bool) -> Iterator[tuple[str, str]]:
        label = f"checkpointable {part.name!r}"
        yield f"{label}: its kind", part.kind
        if part.value is not None and part.same is None:
            yield f"{label}: its value", self._digest(part.value)
        if part.snapshot is None:
            return
        local = set(part.snapshot.local)
        forms = {
            array.name: (array.shape, str(array.dtype), number in local)
            for number, array in enumerate(part.snapshot.arrays)
        }
        record = part.snapshot.record
        if not one_by_one:
            yield label, self._digest(msgspec.msgpack.encode((record.containers, record.leaves, forms)))
            return
        yield f"{label}: its structure", self._digest(msgspec.msgpack.encode(record.containers))
        for name, leaf in record.leaves.items():
            yield f"leaf {f'{part.name}/{name}'!r}", self._digest(msgspec.msgpack.encode((leaf, forms.get(name))))


def refuse_differences(values: Sequence[bytes]) -> bytes:
    """In process 0: say what differs.

    Raises:
        MismatchError: always.
    """
    found = [dict(msgspec.msgpack.decode(value, type=list[tuple[str, str]])) for value in values]
    lines = []
    for label in {label: None for each in found for label in each}:
        digests = [each.get(label) for each in found]
        if len(set(digests)) > 1:
            lines.append(f"{label}: {_told(digests)}")
    shown = "; ".join(lines[:SHOWN]) or "something that is not the same at every look"
    more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    raise MismatchError(
        f"the processes of this job do not save the same: {shown}{more}. What every process has for itself must be "
        "equal in all of them; make one array of it that spans the devices of all"
    )


def _told(digests: Sequence[str | None]) -> str:
    most = Counter(digests).most_common(1)[0][0]
    others = [number for number, digest in enumerate(digests) if digest != most]
    lacking = [number for number in others if digests[number] is None]
    named = ", ".join(map(str, others[:SHOWN])) + (f" and {len(others) - SHOWN} more" if len(others) > SHOWN else "")
    who = f"process {named}" if len(others) == 1 else f"processes {named}"
    have = "has" if len(others) == 1 else "have"
    return f"{who} {have} none, unlike most" if lacking == others else f"{who} {have} another one than most"
