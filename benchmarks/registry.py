"""Registry: the subjects by name, where each runs, and which workloads it cannot do."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.company import Company
from benchmarks.job_workloads import FEW, MANY, MORE, REPLICATED_JOB, ROWS
from benchmarks.memory_copy import NAME as MEMCPY
from benchmarks.raw_disk import NAME as RAW
from benchmarks.subject import Subject
from benchmarks.subject_ours import why_no_variant
from benchmarks.turns import CheckpointerTurns, Turns
from benchmarks.workloads import Workload

OURS = "ours"
TORCH_PYTHON = Path(__file__).resolve().parent.parent / ".venv-torch" / "bin" / "python"

JOBS = (*ROWS.values(), REPLICATED_JOB)

ONE_DEVICE = dict.fromkeys(("sharded", "resharding"), "does not support arrays on several devices of one process")
VARIANT = dict.fromkeys(
    ("llama_stacked", "small_10k", "moe", "sharded", "resharding", "partial"),
    "a variant: measured on dense, llama and small",
)
DEFAULTS_IN_JOBS = dict.fromkeys((ROWS[MORE], ROWS[MANY]), "the default: measured with 2 processes")
VARIANT_IN_JOBS = dict.fromkeys((ROWS[MORE], ROWS[MANY], REPLICATED_JOB), "a variant: measured with 2 processes")
SEE_OTHERS = {REPLICATED_JOB: "a variant: measured with arrays cut into rows"}
SAVES_ALIKE = dict.fromkeys((ROWS[FEW], ROWS[MANY]), "differs from ours where processes need the same bytes")
ONE_REPLICA = dict.fromkeys(ROWS.values(), "needs replicas, of which one reads")
READS_ALL = {"partial": "reads the whole file"}
WHOLE_STATES = {"partial": "restores only whole states, or single objects"}
LIMIT = {"resharding": "has no arrays to reshard: see sharded"}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One subject.

    Attributes:
        made_by: "module:class", below `benchmarks`.
        torch: whether it runs in the environment that `make bench-torch` makes.
        cannot: workload -> why it is left out there.
        quick: whether it has a turn in a quick run.
        setting: for our variants, one of `StoreSettings`, and the values that do the same in these workloads.
    """

    made_by: str
    torch: bool = False
    cannot: dict[str, str] = dataclasses.field(default_factory=dict)
    quick: bool = True
    setting: tuple[Any, ...] = ()


ENTRIES = {
    MEMCPY: Entry("memory_copy:MemcpyTurns", cannot=LIMIT),
    RAW: Entry("raw_disk:RawTurns"),
    "torch_save": Entry("subjects_torch:TorchSave", torch=True, cannot=ONE_DEVICE | READS_ALL, quick=False),
    "torch_dcp": Entry("subjects_torch:TorchDcp", torch=True, cannot=ONE_DEVICE),
    "torchsnapshot": Entry("subjects_torch:Torchsnapshot", torch=True, cannot=ONE_DEVICE | WHOLE_STATES, quick=False),
    "flax_msgpack": Entry("subjects_files:FlaxMsgpack", cannot=ONE_DEVICE | READS_ALL, quick=False),
    "safetensors_mapped": Entry("subjects_torch:SafetensorsMapped", torch=True, cannot=ONE_DEVICE, quick=False),
    "safetensors": Entry("subjects_files:Safetensors", cannot=ONE_DEVICE),
    "orbax_v0": Entry("subjects_orbax:OrbaxV0"),
    "orbax_v0_no_ocdbt": Entry("subjects_orbax:OrbaxV0WithoutOcdbt", cannot=VARIANT, quick=False),
    "orbax_v0_no_compression": Entry("subjects_orbax:OrbaxV0WithoutCompression", cannot=VARIANT, quick=False),
    "orbax_v1": Entry("subjects_orbax:OrbaxV1"),
    "orbax_v1_no_ocdbt": Entry("subjects_orbax:OrbaxV1WithoutOcdbt", cannot=VARIANT, quick=False),
    "orbax_v1_no_compression": Entry("subjects_orbax:OrbaxV1WithoutCompression", cannot=VARIANT, quick=False),
    OURS: Entry("subject_ours:Ours"),
}
IN_JOBS = {
    RAW: ENTRIES[RAW],
    "orbax_v0": Entry("subjects_orbax:OrbaxV0", cannot=DEFAULTS_IN_JOBS),
    "orbax_v0_no_ocdbt": Entry("subjects_orbax:OrbaxV0WithoutOcdbt", cannot=VARIANT_IN_JOBS, quick=False),
    "orbax_v0_no_compression": Entry("subjects_orbax:OrbaxV0WithoutCompression", cannot=SEE_OTHERS),
    "orbax_v0_broadcast": Entry("subjects_orbax:OrbaxV0Broadcast", cannot=ONE_REPLICA),
    "orbax_v1": Entry("subjects_orbax:OrbaxV1", cannot=VARIANT_IN_JOBS),
    "ours_read_each": Entry("subject_ours:OursReadEach", cannot=SAVES_ALIKE, setting=("read_once", False)),
    "ours_over_devices": Entry("subject_ours:OursOverDevices", cannot=SAVES_ALIKE, setting=("read_once",)),
    OURS: ENTRIES[OURS],
}
"""Those that have turns in jobs; a name that is in both is the same subject."""


def make_turns(name: str, workload: Workload, company: Company | None = None) -> Turns:
    """The turns of a subject, made in the process that runs it.

    Args:
        name: a key of `ENTRIES` or `IN_JOBS`, or "package.module:Class" of a `Subject` that is not registered.
        workload: what it saves and loads.
        company: the other processes of its job; None: it is alone.

    Raises:
        ImportError: its library is not installed.
    """
    entry = entry_of(name)
    made = _find(f"benchmarks.{entry.made_by}" if entry else name)
    if name in (RAW, MEMCPY):
        return made(workload)
    return CheckpointerTurns(name, made(), workload, company)


def entry_of(name: str) -> Entry | None:
    """The entry of a name; None: it is not registered."""
    return ENTRIES.get(name) or IN_JOBS.get(name)


def why_not(name: str, workload: str) -> str | None:
    """Why a subject has no turn in a workload; None: it has."""
    entry = (IN_JOBS if workload in JOBS else ENTRIES).get(name)
    if entry is None:
        return None
    if entry.setting and (reason := why_no_variant(*entry.setting)):
        return reason
    if entry.torch and not TORCH_PYTHON.exists():
        return "no PyTorch environment: `make bench-torch` makes it"
    return entry.cannot.get(workload)


def chosen_by_default(quick: bool, entries: Mapping[str, Entry] = ENTRIES) -> list[str]:
    """The subjects of a run that names none."""
    return [name for name, entry in entries.items() if entry.quick or not quick]


def _find(target: str) -> Callable[..., Turns | Subject]:
    module, _, name = target.partition(":")
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))
