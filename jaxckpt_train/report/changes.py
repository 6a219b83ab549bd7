"""The sizes of the leaves of a step, and the changes of leaves between consecutive steps."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

from jaxckpt_train.errors import CheckpointError
from jaxckpt_train.inspection.diff import LeafDiff, diff_leaves, leaves_by_name
from jaxckpt_train.inspection.runs import StepStatus, nbytes_of, open_at
from jaxckpt_train.opened import Opened
from jaxckpt_train.pytree.leaves import describe_saved
from jaxckpt_train.store.backends.base import Backend

FEW_PAIRS, FEW_BYTES = 4, 1 << 30  # the default limits for the comparison, which takes seconds on any disk
FILE = "file"  # the form of a file that is not a leaf


@dataclasses.dataclass(frozen=True)
class LeafChange:
    """The change of a leaf, as in `LeafDiff`."""

    name: str
    kind: str
    relative: float | None
    max_abs: float | None
    differing: int
    count: int


@dataclasses.dataclass(frozen=True)
class PairChange:
    """The leaves that changed between two consecutive steps, and the number of those that did not.

    `relative` is the change of all values together. None: no numbers were compared.
    """

    before: int
    after: int
    leaves: tuple[LeafChange, ...] = ()
    equal: int = 0
    relative: float | None = None
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class Changes:
    """The compared pairs, oldest first, and a sentence about the pairs that were left out, or the empty text."""

    pairs: tuple[PairChange, ...]
    left_out: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """The pairs to compare, oldest first, the bytes that this may read, and a sentence about what is left out."""

    pairs: tuple[tuple[StepStatus, StepStatus], ...]
    bytes: int
    left_out: str


def plan_changes(looks: Sequence[StepStatus], wanted: int | None) -> Plan:
    """Choose the newest pairs of steps."""
    pairs = list(itertools.pairwise(look for look in looks if look.is_restorable))
    most, room = (FEW_PAIRS, FEW_BYTES) if wanted is None else (wanted, None)
    chosen: list[tuple[StepStatus, StepStatus]] = []
    total = 0
    for pair in reversed(pairs[len(pairs) - min(most, len(pairs)) :]):
        needed = sum(look.nbytes or 0 for look in pair)
        if room is not None and total + needed > room:
            break
        chosen.append(pair)
        total += needed
    left_out = ""
    if len(chosen) < len(pairs):
        count = f"{len(pairs) - len(chosen):,} of {len(pairs):,} pairs of consecutive steps"
        left_out = f"{count} were not compared. `--changes {len(pairs)}` compares all of them."
    return Plan(tuple(reversed(chosen)), total, left_out)


def compare(backend: Backend, directory: str, plan: Plan, progress: Callable[[int], object]) -> Changes:
    """Compare the pairs of a plan. A pair that cannot be read gets a `problem`."""
    pairs = tuple(_compared(backend, directory, *pair, progress) for pair in plan.pairs)
    return Changes(pairs, plan.left_out)


def _compared(
    backend: Backend, directory: str, before: StepStatus, after: StepStatus, progress: Callable[[int], object]
) -> PairChange:
    try:
        first, second = (open_at(backend, f"{directory}/{look.name}") for look in (before, after))
        diffs = diff_leaves(first, second, lambda name: True, progress)
    except CheckpointError as error:
        return PairChange(before.step, after.step, problem=str(error))
    changed = tuple(
        LeafChange(diff.name, diff.kind, diff.relative, diff.max_abs, diff.differing, diff.count)
        for diff in diffs
        if diff.kind != "equal"
    )
    return PairChange(before.step, after.step, changed, len(diffs) - len(changed), _relative(diffs))


def _relative(diffs: Sequence[LeafDiff]) -> float | None:
    """Return the relative change of the values that were read; equal leaves are not read."""
    read = [diff for diff in diffs if diff.max_abs is not None]
    if not read:
        return None
    difference, norm = math.hypot(*(diff.difference for diff in read)), math.hypot(*(diff.norm for diff in read))
    return difference / norm if norm else math.inf if difference else 0.0


@dataclasses.dataclass(frozen=True)
class LeafSize:
    """The size of a leaf or a file. `form` is dtype and shape, or the kind."""

    name: str
    form: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class TreeSizes:
    """The leaves of a step in the order of the tree, then its files. `name` is that of its directory."""

    step: int | None
    name: str
    leaves: tuple[LeafSize, ...]


def tree_sizes(opened: Opened, step: int | None) -> TreeSizes:
    """Return the sizes of all leaves, and of the files of checkpointables that are not trees."""
    leaves = [
        LeafSize(name, describe_saved(leaf, array), nbytes_of(array))
        for name, (leaf, array) in leaves_by_name(opened).items()
    ]
    files = [
        LeafSize(f"{part.name}/{file.file.removeprefix(part.name + '/')}", FILE, file.bytes)
        for part in opened.committed.manifest.parts
        for file in part.files
    ]
    return TreeSizes(step, opened.path.rpartition("/")[2], (*leaves, *files))
