"""Saves to object servers and loads from them as tables and a page: `python -m benchmarks.objects_report FILE.json`."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import cost_command
from benchmarks.cells import TextTable
from benchmarks.figure_page import figure_lines, report_command, show_figures
from benchmarks.registry import OURS
from benchmarks.spread import Spread

PAGE = "objects.md"
MIB = 1 << 20
LEAST_OF_OBSTORE = 0.8
LEAST_OF_DCP = 2.0
MOST_BLOCKED_MS = 10.0
ALLOWANCE_MIB = 64
MOST_REQUESTS_OF_SAVE, MOST_REQUESTS_OF_RESUME = 12, 6

HOW_TO_READ = """\
median, and smallest .. largest of the rounds after a warm-up. In a round each subject has its turn, in a process of its
own that has saved or loaded a little before; for memory it has not. Client and server share the processors. versitygw
keeps objects in files and syncs nothing, so loads come from the page cache; HTTP and the processors are the limits.
  obstore alone  one object of the same random bytes, put in parts, or got in ranges into new memory, with the same
                 sizes and as many at once. Ours also makes and checks digests, and for a load JAX arrays
  save           StepManager.save and wait: until the step is committed in the record of the run
  load           the run is opened, and `jct.load_checkpointables` loads the step into JAX arrays; then the clock stops,
                 and all bytes are compared
  restore        StepManager.restore, which copies the arrays once more, into memory of XLA that a step can donate
  of obstore     seconds of obstore alone divided by ours, in the same round: above 1, ours is faster
  blocked        how long the call of StepManager.save takes, for JAX arrays that are not donated
  memory         highest resident memory (VmHWM, reset once the state is there) of a process that saves, less that of
                 one that does all but the save; the goal is about the largest of the rounds
  requests       counted by a stand-in for S3, whatever server the times are of; the goal is about the most
  DCP, Orbax     through a proxy that holds each request back and limits the bodies of both directions together; the
                 warm-up includes a small save or load in the same process. DCP: `torch.distributed.checkpoint` with
                 FsspecWriter and FsspecReader, without a process group, through s3fs, on the same server as ours
  x ours         their seconds divided by ours, in the same round: above 1, ours is faster
  of servers     Orbax needs the JSON API of Google Cloud Storage, which versitygw does not speak, and ours the XML
                 API, which fake-gcs-server does not speak. So each has its own server, and servers differ: these
                 figures compare pairs of a library and a server"""


def of_obstore(results: Mapping[str, Any], alone: str, ours: str) -> list[float]:
    """How fast ours is in each round, relative to obstore alone."""
    speed = results["speed"]
    return [one["seconds"] / other["seconds"] for one, other in zip(speed[alone], speed[ours], strict=True)]


def memory_mib(results: Mapping[str, Any]) -> list[float]:
    """What a save adds to the peak of the process in each round."""
    memory = results["memory"]
    both = zip(memory["save"], memory["no save"], strict=True)
    return [(one["peak_bytes"] - other["peak_bytes"]) / MIB for one, other in both]


def tables(results: Mapping[str, Any]) -> list[TextTable]:
    """All figures as text: the goals, times, requests, and peers."""
    return [_goals(results), _times(results), _requests(results), *_peers(results)]


def _goals(results: Mapping[str, Any]) -> TextTable:
    save, load = (of_obstore(results, *pair) for pair in SUBJECTS.values())
    blocked = [1e3 * each["blocked_s"] for each in results["speed"]["save_by_us"]]
    memory, most_mib = memory_mib(results), results["settings"]["staging_bytes"] // MIB + ALLOWANCE_MIB
    size, requests = results["size"], results["requests"]
    small, resumes = _counts(requests["save of small arrays"]), _counts(requests["manager"])
    lists = max(kinds.count("list") for kinds in requests["manager"])
    resumed = max(resumes) <= MOST_REQUESTS_OF_RESUME and not lists
    rows = [
        _goal("save, of obstore alone", save, f"at least {LEAST_OF_OBSTORE}", _median_is(save, LEAST_OF_OBSTORE)),
        _goal("load, of obstore alone", load, f"at least {LEAST_OF_OBSTORE}", _median_is(load, LEAST_OF_OBSTORE)),
        _goal("blocked, ms", blocked, f"at most {MOST_BLOCKED_MS:g}", statistics.median(blocked) <= MOST_BLOCKED_MS),
        _goal("memory of a save, MiB", memory, f"at most {most_mib}", max(memory) <= most_mib),
        _goal(
            f"requests of a save of {size['small_arrays']:,} arrays",
            small,
            f"at most {MOST_REQUESTS_OF_SAVE}",
            max(small) <= MOST_REQUESTS_OF_SAVE,
        ),
        _goal(
            f"requests of a restore from the newest of {size['steps']:,} steps",
            resumes,
            f"at most {MOST_REQUESTS_OF_RESUME}, no LIST",
            resumed,
        ),
        *_goals_of_dcp(results),
    ]
    return TextTable("goals", ("", "found", "goal", ""), rows)


def _goal(name: str, values: Sequence[float], goal: str, is_met: bool) -> tuple[str, ...]:
    return name, _spread(values), goal, "met" if is_met else "MISSED"


def _median_is(ratios: Sequence[float], least: float) -> bool:
    return statistics.median(ratios) >= least


def _goals_of_dcp(results: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Saves and loads of each variant; none without DCP."""
    peers = results.get("peers", {})
    rows = []
    for what, by_name in peers.get("dcp", {}).get("seconds", {}).items():
        for name in [each for each in by_name if each != OURS]:
            ratios = _by(by_name[name], by_name[OURS])
            shown = f"{what}, of {name}, behind {_network(peers)}"
            rows.append(_goal(shown, ratios, f"at least {LEAST_OF_DCP}", _median_is(ratios, LEAST_OF_DCP)))
    return rows


SUBJECTS = {"save": ("put_by_obstore", "save_by_us"), "load": ("get_by_obstore", "load_by_us")}


def _times(results: Mapping[str, Any]) -> TextTable:
    size = results["size"]
    rows: list[tuple[str, ...]] = []
    for what, (alone, ours) in SUBJECTS.items():
        rows.append(_time(f"{what}, obstore alone", results, alone))
        rows.append(_time(f"{what}, ours", results, ours, of_obstore(results, alone, ours)))
    ratios = of_obstore(results, "get_by_obstore", "restore_by_us")
    rows.append(_time("restore, ours", results, "restore_by_us", ratios))
    arrays = f"{size['small_arrays']:,} arrays of {size['small_bytes'] / 1000:g} kB"
    rows.append((f"save of {arrays}", _spread([each["seconds"] for each in results["small"]]), "", ""))
    rows.append((f"blocked by it, {arrays}", _spread([each["blocked_s"] for each in results["small"]]), "", ""))
    title = f"{size['mib']:,} MiB in {size['arrays']} arrays, and small arrays, on {results['server']}"
    return TextTable(title, ("", "seconds", "MiB/s", "of obstore"), rows)


def _time(name: str, results: Mapping[str, Any], subject: str, ratios: Sequence[float] = ()) -> tuple[str, ...]:
    seconds = [each["seconds"] for each in results["speed"][subject]]
    rate = results["size"]["mib"] / statistics.median(seconds)
    return name, _spread(seconds), f"{rate:,.0f}", _spread(ratios) if ratios else ""


def _peers(results: Mapping[str, Any]) -> list[TextTable]:
    """A table for each peer that was measured."""
    peers, size = results.get("peers", {}), results["size"]
    titles = {
        "dcp": f"PyTorch DCP and ours on {results['server']}",
        "orbax": f"Orbax on fake-gcs-server, and ours on {results['server']}: servers differ",
    }
    found = []
    for peer, title in titles.items():
        rows: list[tuple[str, ...]] = []
        for what, by_name in peers.get(peer, {}).get("seconds", {}).items():
            for name, seconds in by_name.items():
                ratios = "" if name == OURS else _spread(_by(seconds, by_name[OURS]))
                speed = f"{size['mib'] / statistics.median(seconds):,.0f}"
                rows.append((f"{what}, {name}", _spread(seconds), speed, ratios))
        if rows:
            title += f", {size['mib']:,} MiB in {size['arrays']} arrays behind {_network(peers)}"
            found.append(TextTable(title, ("", "seconds", "MiB/s", "x ours"), rows))
    return found


def _by(theirs: Sequence[float], ours: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(theirs, ours, strict=True)]


def _network(peers: Mapping[str, Any]) -> str:
    return f"{1e3 * peers['network']['latency_s']:g} ms and {peers['network']['bytes_per_s'] / 1e6:g} MB/s"


def _requests(results: Mapping[str, Any]) -> TextTable:
    size, counted = results["size"], results["requests"]
    names = {
        "save of small arrays": f"save of {size['small_arrays']:,} arrays",
        "manager": f"StepManager.restore, newest of {size['steps']:,} steps",
        "callback": "CheckpointCallback.resume from it, which also takes ownership of the run",
    }
    rows: list[tuple[str, ...]] = [
        (shown, _spread(_counts(counted[name])), _kinds(counted[name][-1])) for name, shown in names.items()
    ]
    return TextTable("requests", ("", "requests", "of the last round"), rows)


def _counts(rounds: Sequence[Sequence[str]]) -> list[int]:
    return [len(kinds) for kinds in rounds]


def _kinds(kinds: Sequence[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(kinds).items()))


def _spread(values: Sequence[float]) -> str:
    """The median, and the range below it unless all are equal."""
    one, digits = Spread.of(values), _digits(values)
    text = f"{one.median:,.{digits}f}"
    return text if one.minimum == one.maximum else f"{text}\n{one.minimum:,.{digits}f} .. {one.maximum:,.{digits}f}"


def _digits(values: Sequence[float]) -> int:
    if all(float(each).is_integer() for each in values):  # a number of requests
        return 0
    return 3 if max(values) < 1 else 2 if max(values) < 10 else 1


def about_lines(machine: Mapping[str, Any], results: Mapping[str, Any]) -> list[str]:
    """The machine, the versions, and the settings of both subjects."""
    settings = results["settings"]
    return [
        *cost_command.machine_lines(dict(machine)),
        f"server: {results['server']} on loopback; obstore {results['versions']['obstore']}; load average before: "
        f"{machine['load_average_1min']:.2f}",
        f"parts of {settings['part_bytes'] / MIB:g} MiB, {settings['concurrency']} at once; staging_bytes: "
        f"{settings['staging_bytes'] / MIB:g} MiB",
        *_peer_lines(results),
    ]


def _peer_lines(results: Mapping[str, Any]) -> list[str]:
    """The network, the versions and options of the peers, or why they are left out."""
    peers, lines = results.get("peers", {}), []
    if "network" in peers:
        least_s = results["size"]["mib"] * MIB / peers["network"]["bytes_per_s"]
        lines.append(f"network of the peers: {_network(peers)}; at that rate all bytes take {least_s:.1f} s")
    for peer, name in (("dcp", "PyTorch DCP"), ("orbax", "Orbax")):
        figures = peers.get(peer, {"left_out": "measured on versitygw alone"})
        if "left_out" in figures:
            lines.append(f"left out: {name}: {figures['left_out']}")
        else:
            lines.append(f"{name}: " + ", ".join(" ".join(pair) for pair in figures["versions"].items()))
    for name, options in peers.get("dcp", {}).get("options", {}).items():
        groups = [f"{group}: {_assigned(given)}" for group, given in options.items()]
        lines.append(f"{name}: {'; '.join(groups)}")
    return lines


def _assigned(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def show(console: Console, machine: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Everything, in a terminal."""
    show_figures(console, machine, tables(results), HOW_TO_READ, about_lines(machine, results)[2:])


def write(folder: Path, machine: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """The page."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["# Object stores", ""]
    lines += ["Written by `benchmarks.objects_report` from the measurements of `make bench-objects`.", ""]
    lines += [f"- {line}" for line in about_lines(machine, results)]
    lines += ["", "```", results["command"], "```"]
    lines += figure_lines(tables(results), HOW_TO_READ)
    (folder / PAGE).write_text("\n".join(lines), encoding="utf-8")


main = report_command("objects_report", __doc__, PAGE, show, write)

if __name__ == "__main__":
    main()
