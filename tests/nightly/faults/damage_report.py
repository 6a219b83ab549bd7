"""What a campaign of damage came to, and its tables in markdown."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence

from tests.nightly.faults.damages import KINDS
from tests.nightly.faults.layers import LAYERS

CLEAN, UNCHANGED, UNNOTICED = "clean", "changed nothing", "nothing noticed it"
BY = ("byte", "file")


@dataclasses.dataclass(frozen=True)
class Trial:
    """One damaged checkpoint, and who noticed.

    Attributes:
        kind: of damage; "clean" is none.
        by: how the file was chosen: by "byte" or by "file".
        digest: of the checkpoint.
        noticed: by a "load", by a "verify" of all bytes only, or by None.
        layer: which check it was; else "changed nothing", if no byte was another one, or "nothing noticed it".
    """

    kind: str
    by: str
    digest: str
    noticed: str | None
    layer: str


@dataclasses.dataclass
class Found:
    """All trials, and what must not be."""

    trials: collections.Counter[Trial] = dataclasses.field(default_factory=collections.Counter)
    problems: list[str] = dataclasses.field(default_factory=list)

    def count(self, **wanted: str | None) -> int:
        """How many trials have these attributes."""
        fits = ((trial, all(getattr(trial, name) == value for name, value in wanted.items())) for trial in self.trials)
        return sum(self.trials[trial] for trial, is_wanted in fits if is_wanted)

    def damaged(self, **wanted: str | None) -> int:
        """As `count`, without those of clean runs."""
        return self.count(**wanted) - self.count(**{"kind": CLEAN, **wanted})


def tables(found: Found) -> str:
    """Who noticed what: by kind of damage, by digest, and in how many trials."""
    return "\n\n".join((_by_kind(found), _by_digest(found), _shares(found)))


def _by_kind(found: Found) -> str:
    """Layers x kinds; in each cell the trials whose file was chosen by bytes, and those by files."""
    damaged = collections.Counter[tuple[str, str, str]]()
    for trial, count in found.trials.items():
        if trial.kind != CLEAN:
            name = f"{trial.layer} (verify only)" if trial.noticed == "verify" else trial.layer
            damaged[name, trial.kind, trial.by] += count
    order = [*LAYERS, *(f"{layer} (verify only)" for layer in LAYERS), UNCHANGED, UNNOTICED]
    names = {name for name, _, _ in damaged}
    rows = [name for name in order if name in names] + sorted(names - {*order})

    def cell(rows: Iterable[str], kinds: Iterable[str]) -> str:
        counts = [sum(damaged[row, kind, by] for row in rows for kind in kinds) for by in BY]
        return " / ".join(f"{count:,}" for count in counts) if any(counts) else ""

    lines = [[row, *(cell([row], [kind]) for kind in KINDS), cell([row], KINDS)] for row in rows]
    lines.append(["all", *(cell(rows, [kind]) for kind in KINDS), cell(rows, KINDS)])
    return markdown([f"noticed by (chosen by {BY[0]} / by {BY[1]})", *KINDS, "all"], lines)


def _by_digest(found: Found) -> str:
    """The layers at which a digest of the settings decides."""
    digests = _digests(found)
    rows = [
        [layer, *(f"{found.damaged(layer=layer, digest=digest):,}" for digest in digests)]
        for layer in LAYERS
        if "digest" in layer
    ]
    return markdown(["noticed by", *digests], rows)


def _shares(found: Found) -> str:
    """How many changed anything, and how many of these were noticed: for each way of choosing, and each digest."""
    groups = {f"chosen by {by}": {"by": by} for by in BY}
    groups |= {digest: {"digest": digest} for digest in _digests(found)}
    rows = []
    for name, group in {**groups, "all": {}}.items():
        trials, nothing = found.damaged(**group), found.damaged(layer=UNCHANGED, **group)
        load, verify = (found.damaged(noticed=by, **group) for by in ("load", "verify"))
        changed = trials - nothing
        share = "all" if load + verify == changed else f"{math.floor(1e5 * (load + verify) / changed) / 1e3} %"
        clean = found.count(kind=CLEAN, **group)
        alarms = clean - found.count(kind=CLEAN, noticed=None, **group)
        numbers = (trials, nothing, changed, load, verify)
        rows.append([name, *(f"{number:,}" for number in numbers), share, f"{alarms:,} of {clean:,}"])
    what = ("trials", UNCHANGED, "changed", "noticed by a load", "not needed by a load, noticed by verify")
    return markdown(["", *what, "share noticed", "false alarms on clean ones"], rows)


def _digests(found: Found) -> list[str]:
    return list(dict.fromkeys(trial.digest for trial in found.trials))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
