"""Summary: medians, spreads and ratios of the turns of one workload."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence

from benchmarks.raw_disk import NAME as RAW
from benchmarks.raw_disk import NAME_FRESH as RAW_FRESH
from benchmarks.record import WARM_UP_ROUND, Turn
from benchmarks.registry import ENTRIES, IN_JOBS, OURS
from benchmarks.sample import LoadSample, SaveSample
from benchmarks.spread import Spread

LAZY_FRACTION = 0.1
STOLEN_FRACTION, STOLEN_S = 0.05, 0.05

SAVE_MEASURES = ("blocking_s", "finished_s", "durable_s", "durable_cpu_s", "extra_peak_bytes", "stored_bytes")
LOAD_MEASURES = ("load_s", "load_cpu_s", "extra_peak_bytes", "asked_bytes", "disk_bytes")

SAVE_RATIOS = {
    "blocking_by_ours": ("blocking_s", "blocking_s"),
    "plain_by_ours": ("finished_s", "durable_s"),
    "durable_by_ours": ("durable_s", "durable_s"),
    "cpu_by_ours": ("durable_cpu_s", "durable_cpu_s"),
}
LOAD_RATIOS = {"load_by_ours": ("load_s", "load_s"), "cpu_by_ours": ("load_cpu_s", "load_cpu_s")}
"""Name -> the field of the other's sample, divided by this field of our sample of the same round."""

Sample = SaveSample | LoadSample
Rounds = Mapping[int, Sample]


Figures = dict[str, Spread | None]


@dataclasses.dataclass(frozen=True)
class Summary:
    """What one workload gave. A figure is None where a subject has no such measure.

    Attributes:
        saves: row -> measure or ratio -> spread over the counted rounds. `first_bytes` is of the warm-up, in which the
            process is new: its maximum is the extra memory at the peak, its minimum what was left at the end.
        loads: target -> row -> the same.
        warnings: what a reader of the figures has to know.
    """

    saves: dict[str, Figures]
    loads: dict[str, dict[str, Figures]]
    warnings: list[str]


def summarise(turns: Sequence[Turn]) -> Summary:
    """Medians and ratios over the counted rounds; the warm-up is left out.

    `..._by_ours` are their figure divided by ours of the same round: above 1 ours is better. `share_of_raw` is the raw
    limit's time divided by theirs: 1 is as fast as the disk. A load has a second share, of a raw read into new memory.
    """
    counted = [turn for turn in turns if turn.round != WARM_UP_ROUND]
    saves: dict[str, dict[int, Sample]] = {}
    loads: dict[str, dict[str, dict[int, Sample]]] = {}
    for turn in counted:
        saves.setdefault(turn.subject, {})[turn.round] = turn.save
        for load in turn.loads:
            loads.setdefault(load.target, {}).setdefault(load.row, {})[turn.round] = load
    summary = Summary(
        {row: _save_figures(row, saves) for row in sorted(saves, key=_place)},
        {target: {row: _load_figures(row, rows) for row in sorted(rows, key=_place)} for target, rows in loads.items()},
        sorted({*_warnings(counted), *_stolen(counted)}),
    )
    for turn in turns:
        if turn.round == WARM_UP_ROUND:
            _add_first(summary, turn)
    return summary


def _add_first(summary: Summary, turn: Turn) -> None:
    if turn.subject in summary.saves:
        summary.saves[turn.subject]["first_bytes"] = _first(turn.save)
    for load in turn.loads:
        if load.row in summary.loads.get(load.target, {}):
            summary.loads[load.target][load.row]["first_bytes"] = _first(load)


def _first(sample: Sample) -> Spread:
    return Spread.of([sample.resident.extra_peak, sample.resident.left])


def _place(row: str) -> int:
    """The order of the rows: that of the registry, ours last."""
    names = list(dict.fromkeys((*(name for name in ENTRIES if name != OURS), *IN_JOBS)))
    subject = RAW if row == RAW_FRESH else row
    return names.index(subject) if subject in names else len(names)


def _save_figures(row: str, rows: Mapping[str, Rounds]) -> Figures:
    figures: Figures = {"first_bytes": None}
    figures |= {field: _spread(rows[row], _field(field)) for field in SAVE_MEASURES}
    for name, (theirs, ours) in SAVE_RATIOS.items():
        figures[name] = None if row == OURS else _ratio(rows, (row, theirs), (OURS, ours))
    figures["share_of_raw"] = _ratio(rows, (RAW, "durable_s"), (row, "durable_s"))
    figures["largest_share"] = _spread(rows[row], _largest_share)
    return figures


def _load_figures(row: str, rows: Mapping[str, Rounds]) -> Figures:
    figures: Figures = {"first_bytes": None}
    figures |= {field: _spread(rows[row], _field(field)) for field in LOAD_MEASURES}
    for name, (theirs, ours) in LOAD_RATIOS.items():
        figures[name] = None if row == OURS else _ratio(rows, (row, theirs), (OURS, ours))
    figures["reads_by_asked"] = _spread(rows[row], _reads_by_asked)
    figures["disk_by_asked"] = _spread(rows[row], lambda sample: sample.disk_bytes / sample.asked_bytes)
    figures["share_of_raw"] = _ratio(rows, (RAW, "load_s"), (row, "load_s"))
    figures["share_of_raw_fresh"] = _ratio(rows, (RAW_FRESH, "load_s"), (row, "load_s"))
    return figures


def _field(name: str) -> Callable[[Sample], float | None]:
    return lambda sample: getattr(sample, name)


def _largest_share(save: SaveSample) -> float | None:
    """What the process that wrote most has written of what all have; None where there are not several."""
    several = len(save.written_bytes) > 1 and any(save.written_bytes)
    return max(save.written_bytes) / sum(save.written_bytes) if several else None


def _reads_by_asked(load: LoadSample) -> float | None:
    return None if load.read_bytes is None else load.read_bytes / load.asked_bytes


def _spread(rounds: Rounds, value: Callable[[Sample], float | None]) -> Spread | None:
    present = [found for sample in rounds.values() if (found := value(sample)) is not None]
    return Spread.of(present) if present else None


def _ratio(rows: Mapping[str, Rounds], above: tuple[str, str], below: tuple[str, str]) -> Spread | None:
    """The spread of (row, field) / (row, field) over the rounds that both rows have."""
    tops, bottoms = rows.get(above[0], {}), rows.get(below[0], {})
    pairs = [
        (getattr(tops[number], above[1]), getattr(bottoms[number], below[1])) for number in tops if number in bottoms
    ]
    ratios = [top / bottom for top, bottom in pairs if top is not None and bottom]
    return Spread.of(ratios) if ratios else None


def _warnings(turns: Sequence[Turn]) -> list[str]:
    warnings = []
    for turn in turns:
        if not all(sample.notes.get("direct_io", True) for sample in (turn.save, *turn.loads)):
            warnings.append(f"{turn.subject}: the file system refused O_DIRECT; this is not the limit of the disk")
        for load in turn.loads:
            if load.notes.get("caches", "drop_caches") != "drop_caches":
                warnings.append(f"{load.row}: no permission to drop caches; only its own files' pages were (fadvise)")
            if load.notes.get("was_mapped"):
                warnings.append(f"{load.row}: its files were still mapped before a load, so that load was not cold")
            if load.lazy_s > LAZY_FRACTION * load.load_s:
                warnings.append(f"{load.row}: reads lazily; its load time is until every page was touched")
    return warnings


def _stolen(turns: Sequence[Turn]) -> list[str]:
    """Whose figures have the neighbours of this virtual machine in them, from a twentieth of the time on."""
    samples = [(turn.subject, "saves", turn.save.durable_s, turn.save.notes) for turn in turns]
    samples += [(load.row, "loads", load.load_s, load.notes) for turn in turns for load in turn.loads]
    found = collections.Counter(
        (row, what)
        for row, what, took_s, notes in samples
        if float(notes.get("stolen_s", 0.0)) > max(STOLEN_FRACTION * took_s, STOLEN_S)
    )
    of = collections.Counter((row, what) for row, what, _, _ in samples)
    return [
        f"{row}: the host took processor time from {count} of {of[row, what]} {what}"
        for (row, what), count in found.items()
    ]
