"""What is recorded of a run that is watched: what it went on from, and each of its updates, in digests."""

from __future__ import annotations

import msgspec

SMALL_BYTES = 64
OBJECT = "object "  # how the kind begins of what only has a type that can be compared


class Leaf(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One array or value.

    Attributes:
        kind: its dtype; "key<...>" of a PRNG key, "python float" and the like of a Python value.
        shape: of an array, or of the data of keys.
        digest: of its bytes.
        content: its bytes, if there are few.
        at: where they begin in the file of values; -1: they are not there.
    """

    kind: str
    shape: tuple[int, ...]
    digest: str
    content: bytes = b""
    at: int = -1

    def same(self, other: Leaf) -> bool:
        """Whether dtype, shape and bytes are equal."""
        return (self.kind, self.shape, self.digest) == (other.kind, other.shape, other.digest)

    def form(self) -> str:
        """Dtype and shape as text."""
        is_value = self.kind.startswith("python") or self.kind in ("none", "empty")
        return self.kind if is_value else f"{self.kind}[{','.join(map(str, self.shape))}]"


Leaves = dict[str, Leaf]


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """One element that the loop took from its data.

    Attributes:
        digest: of all of it.
        leaves: its arrays by path.
        rows: digests of its examples, if its arrays have as many rows each.
    """

    digest: str
    leaves: Leaves
    rows: tuple[str, ...] = ()

    def unseen(self) -> str | None:
        """What is in it of which only the type can be compared; None: nothing."""
        kinds = (f"{name}, an {leaf.kind}" for name, leaf in self.leaves.items() if leaf.kind.startswith(OBJECT))
        return next(kinds, None)


class Resumed(msgspec.Struct, frozen=True, tag="resumed", tag_field="line"):
    """What a run goes on from.

    Attributes:
        step: that was restored; None: it begins anew.
        directory: where it saves.
        names: of what the loop gave to `resume`.
        leaves: of all of it but the data, as the loop gets them.
        host: digests of the states of the random generators of Python and numpy that are global, by name.
    """

    step: int | None
    directory: str
    names: tuple[str, ...]
    leaves: Leaves
    host: dict[str, str]


class Update(msgspec.Struct, frozen=True, tag="update", tag_field="line"):
    """One completed update.

    Attributes:
        step: its label.
        batches: what was taken from the data since the update before.
        elsewhere: how many more were taken on other threads than that of the loop, which belong to no update.
        metrics, leaves: what the loop told of it, as in Resumed.
        host: as in Resumed.
    """

    step: int
    batches: tuple[Batch, ...]
    elsewhere: int
    metrics: Leaves
    leaves: Leaves
    host: dict[str, str]


class Between(msgspec.Struct, frozen=True, tag="between", tag_field="line"):
    """What happens after `ckpt(...)` of an update and before the next update, if anything is seen there.

    Attributes:
        step: the label of the update.
        polled: whether `ckpt.poll()` is called there, as in an evaluation.
        changed: names of the leaves that change in place there. A save of this update does not have the change.
    """

    step: int
    polled: bool
    changed: tuple[str, ...]


class Stopped(msgspec.Struct, frozen=True, tag="stopped", tag_field="line"):
    """The run is interrupted in this update."""

    step: int


Line = Resumed | Update | Between | Stopped
