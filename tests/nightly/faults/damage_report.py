"""The results of a damage campaign, and their tables in markdown."""

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
    """One damaged checkpoint, and the check that noticed.

    Attributes:
        kind: the kind of damage; "clean" for none.
        by: whether the file was chosen by "byte" or by "file".
        digest: the digest function of the checkpoint.
        noticed: "load", "verify" if only a verification of all bytes noticed, or None.
        layer: the check that noticed; "changed nothing" if no byte differs, or "nothing noticed it".
    """

    kind: str
    by: str
    digest: str
    noticed: str | None
    layer: str


@dataclasses.dataclass
class Found:
    """All trials, and problems."""

    trials: collections.Counter[Trial] = dataclasses.field(default_factory=collections.Counter)
    problems: list[str] = dataclasses.field(default_factory=list)

    def count(self, **wanted: str | None) -> int:
        """Return the number of trials with these attributes."""
        fits = ((trial, all(getattr(trial, name) == value for name, value in wanted.items())) for trial in self.trials)
        return sum(self.trials[trial] for trial, is_wanted in fits if is_wanted)

    def damaged(self, **wanted: str | None) -> int:
        """Return the number of trials with these attributes, without clean runs."""
        return self.count(**wanted) - self.count(**{"kind": CLEAN, **wanted})


def tables(found: Found) -> str:
    """Return tables of what was noticed: by kind of damage, by digest, and as shares."""
    return "\n\n".join((_by_kind(found), _by_digest(found), _shares(found)))


def _by_kind(found: Found) -> str:
    """Return a table of layers and kinds; each cell has the trials chosen by byte, and those by file."""
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
    """Return a table of the layers that depend on the digest of the settings."""
    digests = _digests(found)
    rows = [
        [layer, *(f"{found.damaged(layer=layer, digest=digest):,}" for digest in digests)]
        for layer in LAYERS
        if "digest" in layer
    ]
    return markdown(["noticed by", *digests], rows)


def _shares(found: Found) -> str:
    """Return a table of changed trials and the share noticed, for each choice of files and each digest."""
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
    """Return a table in markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
