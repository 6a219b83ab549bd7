"""Cells: the tables of a record as text, for a terminal and for markdown alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from benchmarks.record import Record, WorkloadRecord
from benchmarks.spread import Spread
from benchmarks.summary import Figures, Summary
from benchmarks.workloads import WHOLE

MB = 1e6

HOW_TO_READ = """\
Median, and min .. max of the counted rounds. CPU: processor time of the subject's process until the save is durable,
or the arrays are loaded. save, plain: until the subject reports that it is finished. save, durable: until all files
and directories are synced. x ours: their time / our time in the same round; above 1, ours is faster. "plain x ours"
divides their save without the additional fsync by our durable one. of raw: the time of the raw limit / their time; 1
is as fast as plain direct I/O, the faster of one thread and two. of raw_fresh: the same for a read into new memory, as
for new arrays. extra memory: resident memory at the peak minus that at the start; for a load it includes the loaded
arrays. first: the same for the first save or load of the process (a round that no other figure includes), and what was
left at its end. from disk: bytes read, relative to the bytes requested.
"""


JOBS_TO_READ = """\
Median, and min .. max of the counted rounds. All processes of a job start together; wall time is until the last of
them is finished, CPU the processor time of all. save, plain: until the subject reports that it is finished. save,
durable: until all files and directories are synced. x ours: their time / our time in the same round; above 1, ours is
faster. of raw: the time of the raw limit (one file, direct calls of two threads of one process) / their time. most by
one: the largest amount written by one process, relative to the total. read: what read calls returned to all processes
together, relative to the bytes of the arrays: what storage would deliver to processes that share no page cache. from
disk: what the disk of this one machine delivered: a process that reads through the page cache gets what another
process has read from there.
"""


@dataclasses.dataclass(frozen=True)
class TextTable:
    """A table whose cells are one or two lines."""

    title: str
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class _Column:
    heading: str
    figure: str
    show: Callable[[Spread], str]


def seconds(spread: Spread) -> str:
    """Seconds with three significant places below one second."""
    return f"{spread.median:.3f}\n{spread.minimum:.3f} .. {spread.maximum:.3f}"


def ratio(spread: Spread) -> str:
    """A ratio."""
    return f"{spread.median:.3g}x\n{spread.minimum:.3g} .. {spread.maximum:.3g}"


def share(spread: Spread) -> str:
    """A share of a limit."""
    return f"{spread.median:.2g}\n{spread.minimum:.2g} .. {spread.maximum:.2g}"


def percent(spread: Spread) -> str:
    """A hundredth, of what there is."""
    low, high = (f"{100 * end:.0f} %" for end in (spread.minimum, spread.maximum))
    middle = f"{100 * spread.median:.0f} %"
    return middle if low == high else f"{middle}\n{low} .. {high}"


def megabytes(spread: Spread) -> str:
    """Millions of bytes."""
    return f"{_rounded(spread.median):,} MB"


def _rounded(nbytes: float) -> int:
    """Millions of bytes; never a negative zero."""
    return round(nbytes / MB)


def peak_and_left(spread: Spread) -> str:
    """The most, and what was left, in millions of bytes."""
    return f"{_rounded(spread.maximum):,} MB\n{_rounded(spread.minimum):,} left"


SAVE_COLUMNS = (
    _Column("blocking s", "blocking_s", seconds),
    _Column("save, plain s", "finished_s", seconds),
    _Column("save, durable s", "durable_s", seconds),
    _Column("durable x ours", "durable_by_ours", ratio),
    _Column("plain x ours", "plain_by_ours", ratio),
    _Column("of raw", "share_of_raw", share),
    _Column("CPU s", "durable_cpu_s", seconds),
    _Column("extra memory", "extra_peak_bytes", megabytes),
    _Column("first", "first_bytes", peak_and_left),
    _Column("stored", "stored_bytes", megabytes),
)
LOAD_COLUMNS = (
    _Column("load s", "load_s", seconds),
    _Column("x ours", "load_by_ours", ratio),
    _Column("of raw", "share_of_raw", share),
    _Column("of raw_fresh", "share_of_raw_fresh", share),
    _Column("CPU s", "load_cpu_s", seconds),
    _Column("extra memory", "extra_peak_bytes", megabytes),
    _Column("first", "first_bytes", peak_and_left),
    _Column("from disk", "disk_bytes", megabytes),
)


JOB_SAVE_COLUMNS = (
    *(column for column in SAVE_COLUMNS if column.figure not in ("extra_peak_bytes", "first_bytes")),
    _Column("most by one", "largest_share", percent),
)
JOB_LOAD_COLUMNS = (
    *(column for column in LOAD_COLUMNS if column.figure not in ("extra_peak_bytes", "first_bytes", "disk_bytes")),
    _Column("read", "reads_by_asked", percent),
    _Column("from disk", "disk_by_asked", percent),
)


def tables(record: WorkloadRecord, summary: Summary) -> list[TextTable]:
    """The saves, and the loads of every target."""
    in_job = record.processes > 1
    save_columns, load_columns = (JOB_SAVE_COLUMNS, JOB_LOAD_COLUMNS) if in_job else (SAVE_COLUMNS, LOAD_COLUMNS)
    size = f"{record.leaves:,} arrays, {record.nbytes / MB:,.1f} MB, {record.counted_rounds} rounds"
    size += f", {record.processes} processes" if in_job else ""
    size += ", each load in a new process" if record.fresh_loads else ""
    size += ", quick" if record.quick else ""
    made = [_table(f"{record.name}: save ({size})", save_columns, summary.saves)]
    for target, rows in summary.loads.items():
        onto = "" if target == WHOLE else f" of {target}" if target == "params" else f" onto {target}"
        asked = next(figures["asked_bytes"] for figures in rows.values())
        title = f"{record.name}: load{onto} ({asked.median / MB:,.1f} MB requested)" if asked else record.name
        made.append(_table(title, load_columns, rows))
    return made


def absent(record: WorkloadRecord) -> list[str]:
    """Who had no turn, and why; a line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for subject, reason in record.left_out.items():
        by_reason.setdefault(reason, []).append(subject)
    return [f"left out: {', '.join(subjects)}: {reason}" for reason, subjects in by_reason.items()]


def how_to_read(record: Record) -> str:
    """What the columns are."""
    kinds = {workload.processes > 1 for workload in record.workloads.values()}
    return "\n".join([*([HOW_TO_READ] if kinds != {True} else []), *([JOBS_TO_READ] if True in kinds else [])])


def machine_lines(record: Record) -> list[str]:
    """One line each for every machine and its file system, and for the versions."""
    lines = []
    for machine, names in record.machines:
        gib = int(machine["memory_bytes"] or 0) / (1 << 30)
        of = f" of {', '.join(names)}" if len(record.machines) > 1 else ""
        lines += [
            f"machine{of}: {machine['cores']} cores ({machine['processor']}), {gib:.1f} GiB, {machine['kernel']}",
            f"files: {machine['file_system']} on {machine['device']}, {machine['mount_options']}",
        ]
    return [*lines, "versions: " + ", ".join(f"{name} {version}" for name, version in record.versions.items())]


def _table(title: str, columns: tuple[_Column, ...], rows: Mapping[str, Figures]) -> TextTable:
    present = [column for column in columns if any(figures[column.figure] for figures in rows.values())]
    cells = [
        (row, *(column.show(spread) if (spread := figures[column.figure]) else "-" for column in present))
        for row, figures in rows.items()
    ]
    return TextTable(title, ("subject", *(column.heading for column in present)), cells)
