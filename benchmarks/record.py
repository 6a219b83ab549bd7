"""Record: all samples of a run, the machine and the versions, as a JSON file keeps them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import Description
from benchmarks.sample import LoadSample, SaveSample

JSON_VERSION = 2
WARM_UP_ROUND = 0
SAME_MACHINE = ("cores", "processor", "memory_bytes", "kernel", "file_system", "device")


@dataclasses.dataclass(frozen=True)
class Turn:
    """One subject's turn in one round; round 0 is the warm-up and counts in no summary."""

    round: int
    subject: str
    save: SaveSample
    loads: list[LoadSample]

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Turn:
        """What `dataclasses.asdict` and JSON made of one."""
        loads = [LoadSample.from_json(load) for load in fields["loads"]]
        return cls(fields["round"], fields["subject"], SaveSample.from_json(fields["save"]), loads)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkloadRecord:
    """What was measured of one workload.

    Attributes:
        name, nbytes, leaves, targets: of the workload.
        counted_rounds, seed, quick, fresh_loads: how it was run.
        command: the command line that did.
        load_average: of the machine over the minute before it began.
        commit: of the code, "-dirty" if there was more; None: not known.
        machine: on which it ran, if that is not the record's.
        processes: of the jobs that saved and loaded it; 1: no jobs.
        versions: of what the subjects are made of.
        left_out: subject -> why it had no turn.
        failed: subject -> what went wrong.
        turns: all of them, the warm-up too.
    """

    name: str
    nbytes: int
    leaves: int
    targets: tuple[str, ...]
    counted_rounds: int
    seed: int
    quick: bool
    fresh_loads: bool
    command: str
    load_average: float
    versions: dict[str, str | None]
    left_out: dict[str, str]
    failed: dict[str, str]
    turns: list[Turn]
    commit: str | None = None
    machine: Description | None = None
    processes: int = 1

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> WorkloadRecord:
        """What `dataclasses.asdict` and JSON made of one."""
        turns = [Turn.from_json(turn) for turn in fields["turns"]]
        return cls(**{**fields, "targets": tuple(fields["targets"]), "turns": turns})


@dataclasses.dataclass(frozen=True)
class Record:
    """The machine, and what was measured on it."""

    machine: Description
    workloads: dict[str, WorkloadRecord]

    @property
    def versions(self) -> dict[str, str | None]:
        """Those of all workloads together."""
        found: dict[str, str | None] = {}
        for workload in self.workloads.values():
            found |= workload.versions
        return dict(sorted(found.items()))

    @property
    def machines(self) -> list[tuple[Description, list[str]]]:
        """The machines, and which workloads ran on each: a figure is a ratio within one workload."""
        found: dict[tuple[object, ...], tuple[Description, list[str]]] = {}
        for workload in self.workloads.values():
            machine = workload.machine or self.machine
            found.setdefault(tuple(machine[field] for field in SAME_MACHINE), (machine, []))[1].append(workload.name)
        return list(found.values()) or [(self.machine, [])]

    def of_jobs(self, jobs: bool) -> Record:
        """Only the workloads of jobs, or only the others."""
        chosen = {name: each for name, each in self.workloads.items() if (each.processes > 1) == jobs}
        return Record(self.machine, chosen)

    def write(self, file: Path) -> None:
        """Write it as JSON."""
        file.parent.mkdir(parents=True, exist_ok=True)
        fields = {"version": JSON_VERSION, **dataclasses.asdict(self)}
        file.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> Record:
        """Read what `write` wrote.

        Raises:
            ValueError: the file is of another version.
        """
        fields = json.loads(file.read_text(encoding="utf-8"))
        if fields.get("version") != JSON_VERSION:
            raise ValueError(f"{file}: version {fields.get('version')}, wanted {JSON_VERSION}; measure anew")
        workloads = {name: WorkloadRecord.from_json(workload) for name, workload in fields["workloads"].items()}
        return cls(fields["machine"], workloads)


def merge(records: Sequence[Record]) -> Record:
    """The workloads of several runs, each with the machine that it ran on; of two of one name the later one counts."""
    workloads: dict[str, WorkloadRecord] = {}
    for record in records:
        for name, workload in record.workloads.items():
            workloads[name] = dataclasses.replace(workload, machine=workload.machine or record.machine)
    return Record(records[0].machine, workloads)
