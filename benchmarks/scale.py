"""Jobs of up to 100,000 processes, planned and simulated: what each process does in a save, and what process 0 does."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import scale_latency
from benchmarks.machine import ROOT, describe
from benchmarks.scale_storage import save_together

MIB = 1 << 20
CASES = [("fsdp", processes, 1000) for processes in (64, 256, 1000, 4000, 16_000, 64_000)]
CASES += [("fsdp", processes, 10_000) for processes in (64, 256, 1000)]
CASES += [(layout, n, 1000) for layout in ("fsdp-tp", "hsdp", "replicated") for n in (64, 1000, 16_000, 64_000)]
INDEXED = [(layout, processes, 1000) for layout in ("fsdp", "fsdp-tp") for processes in (1000, 16_000, 100_000)]
CASES += [("hsdp", 100_000, 1000), ("replicated", 100_000, 1000)]
QUICK = [("fsdp", 64, 100), ("hsdp", 256, 100), ("fsdp", 1000, 100)]
CLIENTS = (4, 16, 64, 256)
GATHERED = ((1000, 36_000), (4000, 36_000), (1000, 360_000))
SAVED = ((2, 100), (64, 100), (250, 100))

Rows = Iterator[Sequence[str]]


def table(headings: Sequence[str], rows: Rows) -> str:
    """In Markdown."""
    lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), ""])


def planned(cases: Sequence[tuple[str, int, int]], module: str = "scale_case") -> list[dict[str, Any]]:
    """The figures of all cases, each from a process of its own."""
    found = []
    for case in cases:
        command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, case)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        found.append({"layout": case[0], **json.loads(done.stdout)})
        print(f"{' '.join(map(str, case))}: done", file=sys.stderr)
    return found


def _case(each: dict[str, Any]) -> list[str]:
    return [each["layout"], f"{each['processes']:,}", f"{each['arrays']:,}"]


def of_each(figures: Sequence[dict[str, Any]]) -> str:
    """What one process does, but for its data."""
    headings = ["layout", "processes", "arrays", "chunks", "MiB of data, least to most", "layouts, ms", "plan, ms"]
    headings += ["index, ms", "index, KB", "key-value calls", "KB sent"]
    rows = (
        [
            *_case(each),
            f"{each['chunks']:,}",
            f"{each['bytes_min'] / MIB:,.1f} to {each['bytes_max'] / MIB:,.1f}",
            f"{1e3 * each['layouts_s']:.1f}",
            f"{1e3 * each['plan_s']:.1f}",
            f"{1e3 * each['encode_index_s']:.1f}",
            f"{each['index_bytes'] / 1e3:,.1f}",
            f"{each['each_operations']}",
            f"{each['each_sent_bytes'] / 1e3:,.1f}",
        ]
        for each in figures
    )
    return table(headings, rows)


def of_process_0(figures: Sequence[dict[str, Any]]) -> str:
    """The additional work of process 0."""
    headings = ["layout", "processes", "arrays", "CPU, s", "memory, MiB", "key-value calls", "MB received"]
    headings += ["manifest, MB"]
    rows = (
        [
            *_case(each),
            f"{each['process_0_s']:.2f}",
            f"{each['process_0_bytes'] / MIB:,.0f}",
            f"{each['process_0_operations']:,}",
            f"{each['process_0_received_bytes'] / 1e6:,.1f}",
            f"{each['manifest_bytes'] / 1e6:,.1f}" if "manifest_bytes" in each else "not merged",
        ]
        for each in figures
    )
    return table(headings, rows)


def of_reader(figures: Sequence[dict[str, Any]]) -> str:
    """What each process does that loads it."""
    headings = ["layout", "processes", "arrays", "decode, s", "plan of reads, s", "memory, MiB", "files read"]
    rows = (
        [
            *_case(each),
            f"{each['decode_s']:.2f}",
            f"{each['read_plan_s']:.2f}",
            f"{each['reader_peak_bytes'] / MIB:,.0f}",
            f"{each['files_read']:,}",
        ]
        for each in figures
        if "decode_s" in each
    )
    return table(headings, rows)


def of_index_files(figures: Sequence[dict[str, Any]]) -> str:
    """What process 0 does in a save with index files, and what each process does in a load."""
    headings = ["layout", "processes", "arrays", "process 0: CPU, s", "memory, MiB", "MB received", "manifest, KB"]
    headings += ["a reader: seconds", "memory, MiB", "index files", "KB read", "KB needed"]
    rows = (
        [
            *_case(each),
            f"{each['process_0_s']:.2f}",
            f"{each['process_0_bytes'] / MIB:,.0f}",
            f"{each['process_0_received_bytes'] / 1e6:,.1f}",
            f"{each['manifest_bytes'] / 1e3:,.0f}",
            f"{each['reader_s']:.2f}",
            f"{each['reader_peak_bytes'] / MIB:,.0f}",
            f"{each['index_files_read']}",
            f"{each['index_bytes_read'] / 1e3:,.1f}",
            f"{each['index_bytes_needed'] / 1e3:,.1f}",
        ]
        for each in figures
    )
    return table(headings, rows)


def of_storage() -> str:
    """What whole saves ask of the storage."""

    def rows() -> Rows:
        for processes, arrays in SAVED:
            saved = save_together(processes, arrays)
            for name, number in (("0", 0), ("any other", 1)):
                counts = ", ".join(f"{what} {count}" for what, count in sorted(saved.storage[number].items()))
                calls = saved.values[number].operations
                yield [f"{processes:,}", name, counts, f"{saved.listed[number]}", f"{calls.total()}"]

    return table(["processes", "process", "calls to the storage", "entries listed", "key-value calls"], rows())


def of_single_calls() -> Iterator[str]:
    """One client of the real key-value store."""
    with scale_latency.serving(1) as address:
        client = scale_latency.client_of(address, 0)
        calls = scale_latency.one_by_one(client).items()
        found = scale_latency.listed(client).items()
        client.shutdown()
    rows = ([size, call, f"{us:,.0f}"] for size, all_ in calls for call, us in all_.items())
    yield table(["value", "call", "microseconds"], rows)
    rows = ([name, f"{ms['find']:,.1f}", f"{ms['delete']:,.1f}"] for name, ms in found)
    yield table(["keys below a folder", "find, ms", "delete, ms"], rows)


def of_many(clients: Sequence[int]) -> Iterator[str]:
    """Many clients of the real key-value store, and many values in it."""
    together = ((number, scale_latency.together(number)) for number in clients)
    rows = (
        [f"{number}", f"{ms['exchange_ms']:.1f}", f"{ms['barrier_ms']:.1f}", f"{ms['calls_per_s']:,.0f}"]
        for number, ms in together
    )
    yield table(["clients", "exchange, ms", "JAX's barrier, ms", "sets a second, all together"], rows)
    heard = ((*case, scale_latency.gathered(*case)) for case in GATHERED)
    rows = (
        [f"{n:,} of {size:,} B", f"{s['cpu_while_given_s']:.2f}", f"{s['cpu_s']:.2f}", f"{s['wall_s']:.2f}"]
        for n, size, s in heard
    )
    yield table(["values", "CPU of the service while they are given, s", "CPU in all, s", "hearing them, s"], rows)


def main() -> None:
    """Measure, and print tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less of the same in half a minute")
    parser.add_argument("--json", type=Path, default=None, help="where the figures of the planned jobs go, too")
    options = parser.parse_args()
    print(json.dumps(describe(Path(tempfile.gettempdir())), indent=1))
    figures = planned(QUICK if options.quick else CASES)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    indexed = planned(QUICK[:1] if options.quick else INDEXED, "scale_indexes")
    for text in (*(of(figures) for of in (of_each, of_process_0, of_reader)), of_index_files(indexed), of_storage()):
        print(text)
    for text in () if options.quick else (*of_single_calls(), *of_many(CLIENTS)):
        print(text)


if __name__ == "__main__":
    main()
