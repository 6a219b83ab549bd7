"""StoreSettings: how bytes are written, checked and read."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from jaxckpt_train._validation import shown
from jaxckpt_train.errors import SettingsError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
Durability = Literal["full", "file", "none"]
DigestName = Literal["xxh3-128", "sha256", "blake3"]
SnapshotMode = Literal["auto", "host", "device", "stream"]
NonFinite = Literal["allow", "warn", "reject"]
Colocated = bool | Literal["auto"]
DEFAULT_IO_THREADS = 2
STALL_TIMEOUT_S = 60.0  # of a step manager and whoever makes one
_CHOICES: dict[str, tuple[object, ...]] = {
    "durability": ("full", "file", "none"),
    "digest": ("xxh3-128", "sha256", "blake3"),
    "direct_io": ("auto", True, False),
    "snapshot": ("auto", "host", "device", "stream"),
    "nonfinite": ("allow", "warn", "reject"),
    "colocated": ("auto", True, False),
    "read_once": ("auto", True, False),
}
MOST_IO_THREADS = 64
_MINIMUM = {
    "segment_bytes": 1 * MIB,
    "staging_bytes": 1 * MIB,
    "read_budget_bytes": 1 * MIB,
    "io_threads": 1,
    "scrub_bytes_per_s": 0,
}
_MAXIMUM = dict.fromkeys(_MINIMUM, 1 << 50)  # of bytes: more than any machine has, and what C can count
_MAXIMUM["io_threads"] = MOST_IO_THREADS  # threads stay until the process ends
_WORDS: dict[str, tuple[str, ...]] = {"io_threads": ("auto",)}  # what may stand for a number


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """How checkpoints are stored. Checks itself when built.

    Attributes:
        durability: "full": files, directories and the parent are synced before a save is acknowledged;
            "file": files are synced, directories are not; "none": nothing is synced. Without "full", retention syncs
            the newest step before it deletes older ones, in the background (closing waits for that), and to overwrite
            a single checkpoint may lose both in a power cut.
        digest: of every block of data: "xxh3-128" (fast), "sha256", or "blake3" (needs the `blake3` package).
        verify_on_load: compare the digests of all bytes that a load reads.
        segment_bytes: a segment file is closed and the next begun before it exceeds this many bytes of data,
            unless a single chunk is larger.
        staging_bytes: host memory of the staging buffers between a snapshot and the disk; kept between saves.
        read_budget_bytes: host memory that a load may use beyond its destination. An array that only passes (to an
            accelerator, or converted) takes its own size if that is more; while it is put together of several pieces
            it comes on top, at most one for each thread that reads.
        io_threads: how many writes the disk is given at a time, and half of how many reads; at most 64. "auto": 2, and
            for writes what the first large saves to a disk measure as clearly faster; known until the process ends.
            Give each write 8 MiB of staging buffers, or a save may take up to `staging_bytes` more.
        direct_io: True: `O_DIRECT`, or an error where the file system refuses it; False: through the page cache;
            "auto": direct where the file system takes it.
        snapshot: how the call to save makes the state on accelerators safe. "host": it orders copies to
            pinned host memory, or waits for copies to other host memory where devices know no pinned one;
            "device": it orders copies on the devices, which need memory for the state twice until they are written;
            "auto": "device" where that surely fits beside all that training has used before, else "host"; "stream": it
            returns once all has left the devices, with no more than `staging_bytes` of the state, and the arrays being
            written, in host memory beside the staging buffers. State on the CPU is held, not copied, by "auto",
            until it is seen that the loop donates it meanwhile: such a step is slow, as it gets new memory. From then
            on, and with "host", it is copied into memory that is kept from save to save: the call takes longer, that
            step does not.
        nonfinite: what a save does about nan, and about inf in arrays (a single number may be inf): "allow": nothing;
            "warn": it warns, naming the leaves; "reject": it fails with NonFiniteError, so that the steps before stay
            the newest. They are looked for on the devices, and the answers awaited in the background.
        scrub_bytes_per_s: at most so many bytes of the steps of a run are read again each second while it goes on, one
            step after the other, to find damage while other steps are whole; what is found is set aside. 0: none, but
            the neighbours of a step that was set aside, those saved right before and after it, are still read once
            where the restore has not compared all of them, at most 64 MiB a second.
        read_once: in a job of several processes, how a load onto arrays that span them reads what several of them need.
            True: each reads a share of its own, and all processes load the same together. If all run on one machine
            they look at each other's shares in memory, else these go from process to process over the devices; at most
            `read_budget_bytes` at a time. False: each reads all that it needs itself, and none waits for another.
            "auto": as True where the job would else read noticeably more than the checkpoint has (a fiftieth of it,
            and 64 MiB); on one machine whose processes do not see each other's memory, as in containers, each reads
            through the page cache, which has what another one has read.
        barrier_timeout_s: in a job of several processes, seconds after which another process is not waited for any
            more that has not got any further, or is gone; the save or load fails in all of them then.
        colocated: whether the hosts of the devices save and load the arrays there, through JAX's Colocated Python, and
            not this process. "auto": where the runtime drives devices of many hosts from one process (Pathways);
            True: always; False: never. Needs `cloudpickle`, and this package and the storage on all hosts.

    Raises:
        SettingsError: a value is out of range or of the wrong type.
    """

    durability: Durability = "full"
    digest: DigestName = "xxh3-128"
    verify_on_load: bool = True
    segment_bytes: int = 2 * GIB
    staging_bytes: int = 96 * MIB
    read_budget_bytes: int = 256 * MIB
    io_threads: int | Literal["auto"] = "auto"
    direct_io: bool | Literal["auto"] = "auto"
    snapshot: SnapshotMode = "auto"
    nonfinite: NonFinite = "allow"
    scrub_bytes_per_s: int = 0
    read_once: bool | Literal["auto"] = "auto"
    barrier_timeout_s: float = 300.0
    colocated: Colocated = "auto"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
                wanted = ", ".join(map(repr, choices))
                raise SettingsError(f"StoreSettings.{name}: expected one of {wanted}, found {value!r}")
        for name, least in _MINIMUM.items():
            value, words = getattr(self, name), _WORDS.get(name, ())
            if isinstance(value, str) and value in words:
                continue
            most = _MAXIMUM[name]
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                unit = " of bytes" if name.endswith("_bytes") else ""
                more = "".join(f" or {word!r}" for word in words)
                wanted = f"a whole number{unit} from {least} to {most}{more}"
                raise SettingsError(f"StoreSettings.{name}: expected {wanted}, found {shown(value)}")
        limit_s = self.barrier_timeout_s
        if not isinstance(limit_s, (int, float)) or isinstance(limit_s, bool) or not 0 < limit_s < math.inf:
            raise SettingsError(f"StoreSettings.barrier_timeout_s: expected seconds above 0, found {limit_s!r}")
        if not isinstance(self.verify_on_load, bool):
            raise SettingsError(f"StoreSettings.verify_on_load: expected true or false, found {self.verify_on_load!r}")

    @property
    def known_io_threads(self) -> int:
        """`io_threads`, or the default where they are to be measured."""
        return DEFAULT_IO_THREADS if self.io_threads == "auto" else self.io_threads


def checked_settings(subject: str, settings: Any) -> StoreSettings:
    """The settings that were given, or the defaults for None.

    Raises:
        SettingsError: it is something else.
    """
    if settings is None:
        return StoreSettings()
    if not isinstance(settings, StoreSettings):
        raise SettingsError(
            f"{subject}: expected a StoreSettings, as jaxckpt_train.StoreSettings(io_threads=4), found {settings!r}"
        )
    return settings
