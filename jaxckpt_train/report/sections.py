"""The sections of a report: what each says in words, with its charts and tables."""

from __future__ import annotations

from collections.abc import Callable

from jaxckpt_train.report.charts_of_steps import pair_name
from jaxckpt_train.report.drawing import MOST_METRICS, Drawing, metric_place, shown_pairs
from jaxckpt_train.report.gathering import Gathered
from jaxckpt_train.report.markup import Html, element, joined
from jaxckpt_train.report.page_parts import chart_html, facts, note, problems, section, table_html
from jaxckpt_train.report.quantities import (
    bytes_text,
    clipped,
    counted,
    number_text,
    percent_text,
    rate_text,
    seconds_text,
    time_text,
)
from jaxckpt_train.report.tables import (
    Table,
    changes_table,
    marks_table,
    metric_table,
    processes_table,
    restores_table,
    saves_table,
    spent_table,
    steps_table,
    use_table,
)

Section = Callable[[Gathered, Drawing], Html]
NAMES = (
    ("timeline", "Timeline"),
    ("throughput-of-saves", "Throughput"),
    ("goodput", "Goodput"),
    ("steps", "Steps"),
    ("metrics", "Metrics"),
    ("tree", "Tree"),
    ("step-to-step", "Changes"),
)


def summary(gathered: Gathered) -> Html:
    """What matters at a glance, and what is wrong."""
    there = [step for step in gathered.steps if step.is_there]
    newest = max((step.step for step in there if step.is_current and not step.problem), default=None)
    totals, counts = gathered.totals, gathered.counts
    rows = [
        ("Newest whole step", "none" if newest is None else f"{newest:,}", counted(len(there), "step") + " there"),
        ("On the disk", bytes_text(sum(step.bytes or 0 for step in there)), "data of all steps"),
        ("Useful time", percent_text(totals.share) if gathered.processes else "not known", _of_time(gathered)),
        ("Processes", f"{len(gathered.processes):,}", "one is at work" if gathered.is_live else "none is at work"),
        ("Saves", f"{counts.saves - counts.failed_saves:,}", f"{counts.failed_saves:,} failed"),
        ("Blocked by saves", seconds_text(counts.blocked_s), _per_save(gathered)),
    ]
    wrong = [f"Step {step.step}, {step.name}: {step.problem}" for step in gathered.damaged]
    failed = [save for save in gathered.saves if not save.ok]
    wrong += [f"Step {save.step} was not saved at {time_text(save.ended)}: {save.error}" for save in failed[-10:]]
    return joined(
        facts(rows),
        problems("What is wrong", wrong) if wrong else None,
        problems("What could not be read", gathered.warnings) if gathered.warnings else None,
    )


def _of_time(gathered: Gathered) -> str:
    return f"of {seconds_text(gathered.totals.wall_s)}" if gathered.processes else "the history tells of no process"


def _per_save(gathered: Gathered) -> str:
    counts = gathered.counts
    return f"{seconds_text(counts.blocked_s / counts.saves)} each" if counts.saves else "no save"


def timeline(gathered: Gathered, drawing: Drawing) -> Html:
    """What happened when."""
    if not (gathered.saves or gathered.restores or gathered.processes or gathered.marks):
        return section("timeline", "Timeline", note("The history tells of nothing yet."))
    tables: list[tuple[str, Table]] = [
        ("processes", processes_table(gathered.processes, gathered.totals)),
        ("saves", saves_table(gathered.saves, gathered.counts.saves)),
        ("restores", restores_table(gathered.restores, gathered.counts.restores)),
        ("other events", marks_table(gathered.marks, gathered.counts.marks)),
    ]
    events = ", ".join(f"{count:,} {clipped(kind, 40)}" for kind, count in list(gathered.events.items())[:20])
    return section(
        "timeline",
        "Timeline",
        note(f"Times are in UTC. The history has these events: {events}."),
        chart_html(
            drawing, "timeline", "The run.", "Processes by how they ended, saves, restores, other events.", tables
        ),
        chart_html(
            drawing,
            "save-times",
            "Time of each save.",
            "Blocked: the loop stood still. In the background: it went on meanwhile.",
            [("saves", tables[1][1])],
        ),
    )


def throughput(gathered: Gathered, drawing: Drawing) -> Html:
    """How fast bytes went to the disk and came back."""
    if "throughput" not in drawing.places:
        return section("throughput-of-saves", "Throughput", note("No save or restore has told how fast it was."))
    disk, counts = gathered.disk, gathered.counts
    saves, restores = saves_table(gathered.saves, counts.saves), restores_table(gathered.restores, counts.restores)
    limit = "With --measure-disk this has a line for what the disk takes."
    if disk is not None:
        limit = (
            f"The disk took {rate_text(disk.bytes_per_s)} when this report was made: the fastest of {disk.tries} "
            f"synced writes of {bytes_text(disk.bytes)} by one process."
        )
    return section(
        "throughput-of-saves",
        "Throughput",
        note(limit),
        chart_html(
            drawing,
            "throughput",
            "Bytes a second.",
            "A save counts from its first write to its commit, a restore as a whole.",
            [("saves", saves), ("restores", restores)],
        ),
    )


def goodput(gathered: Gathered, drawing: Drawing) -> Html:
    """Where the time went."""
    if not gathered.processes:
        return section("goodput", "Goodput", note("The history tells of no process."))
    totals = gathered.totals
    words = (
        f"{percent_text(totals.share)} of {seconds_text(totals.wall_s)} went into updates that count: "
        f"{counted(totals.useful_steps, 'update')}. Lost, and done again or to be done: "
        f"{counted(totals.redone_steps, 'update')}."
    )
    return section(
        "goodput",
        "Goodput",
        element("p", words),
        chart_html(
            drawing,
            "time-spent",
            "Where the time went.",
            "The run, and each process in shares of its own time.",
            [("where the time of the run went", spent_table(totals))],
        ),
        table_html(processes_table(gathered.processes, totals), "Processes"),
    )


def steps(gathered: Gathered, drawing: Drawing) -> Html:
    """What became of each step."""
    if not gathered.steps:
        return section("steps", "Steps", note("No step was saved yet."))
    by_state = ", ".join(f"{count:,} {state}" for state, count in gathered.counts.states.items())
    return section(
        "steps",
        "Steps",
        element("p", f"{counted(gathered.counts.steps, 'step')}: {by_state}."),
        chart_html(
            drawing,
            "retention",
            "Retention.",
            "A line for each step, from when it was saved to when it was deleted, by what it is now.",
            [("steps", steps_table(gathered.steps, gathered.counts.steps))],
        ),
        chart_html(
            drawing,
            "disk-use",
            "Room on the disk.",
            "The data of all steps.",
            [("room", use_table(gathered))],
        ),
    )


def metrics(gathered: Gathered, drawing: Drawing) -> Html:
    """Metrics by step."""
    if not gathered.metrics:
        return section("metrics", "Metrics", note("No step that is known has metrics."))
    charts = []
    for number, (name, values) in enumerate(gathered.metrics.items()):
        there = gathered.counts.values[name]
        table = metric_table(values, there)
        known = f"{counted(there, 'step')}, the last one {number_text(values[-1].value)}."
        if number < MOST_METRICS:
            charts.append(chart_html(drawing, metric_place(number), clipped(name, 60), known, [("values", table)]))
    left_out = len(gathered.metrics) - MOST_METRICS
    more = note(f"{counted(left_out, 'more metric')} left out; `--json` has them.") if left_out > 0 else None
    about = note(
        "Of the steps that the run descends from. What deleted steps had is known as far as the history has it."
    )
    return section("metrics", "Metrics", about, element("div", charts, class_="pairs"), more)


def changes(gathered: Gathered, drawing: Drawing) -> Html:
    """How far leaves moved from step to step."""
    pairs = gathered.changes.pairs
    left_out = note(gathered.changes.left_out) if gathered.changes.left_out else None
    if not pairs:
        none = None if left_out else note("There are no two steps to compare.")
        return section("step-to-step", "Changes", none, left_out)
    more, failed = "", [f"{pair_name(pair)}: {pair.problem}" for pair in pairs if pair.problem]
    good = shown_pairs(gathered)
    if len(good) + len(failed) < len(pairs):
        more = f"The last {len(good):,} of {len(pairs) - len(failed):,} pairs that were compared; `--json` has all."
    lines = [
        f"{pair_name(pair)}: {counted(len(pair.leaves), 'leaf', 'leaves')} changed, {pair.equal:,} did not"
        for pair in good
    ]
    table = changes_table(good, [pair_name(pair) for pair in good])
    return section(
        "step-to-step",
        "Changes",
        note("The relative change of a leaf is the norm of its difference by the norm of what it was before."),
        element("ul", [element("li", line) for line in lines]) if lines else None,
        problems("What could not be compared", failed) if failed else None,
        chart_html(
            drawing,
            "changes",
            "Change of each leaf.",
            "From one step that is kept to the next.",
            [("changes of leaves", table)],
        ),
        note(more) if more else None,
        left_out,
    )
