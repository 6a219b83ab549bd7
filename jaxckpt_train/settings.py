"""StoreSettings: how checkpoints are written, checked and read. ObjectStoreSettings: how an object store is reached."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from jaxckpt_train._validation import (
    check_fields,
    duration,
    endpoint,
    fraction,
    known_keys,
    local_directory,
    own_address,
    refuse,
    seconds,
    text,
    texts_by_name,
    whole,
)
from jaxckpt_train.errors import SettingsError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
Durability = Literal["full", "file", "none"]
DigestName = Literal["xxh3-128", "sha256", "blake3"]
SnapshotMode = Literal["auto", "host", "device", "stream"]
NonFinite = Literal["allow", "warn", "reject"]
Colocated = bool | Literal["auto"]
STALL_TIMEOUT_S = 60.0  # the default of StepManager and CheckpointCallback
MOST_IO_THREADS = 64  # the threads live until the process ends
_MOST = 1 << 50  # bytes: more than any machine has, and within C's integers
_Bytes = Annotated[int, whole(MIB, _MOST)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectStoreSettings:
    """How `s3://`, `gs://` and `az://` are reached. An instance checks its values when it is created.

    Credentials are not here: they come from the cloud's own chain (environment, profile, instance), as obstore finds
    them.

    Attributes:
        endpoint: the URL of the service, such as "https://minio.example.com". None: the cloud's own, or what the
            environment says (`AWS_ENDPOINT_URL`, `GOOGLE_BASE_URL`, `AZURE_STORAGE_ENDPOINT`).
        region: the region of an S3 bucket. None: what the environment says.
        part_bytes: the size of the parts of an upload, and of the requests of a load. S3 allows 10,000 parts, of at
            least 5 MiB.
        concurrency: how many parts of one object are sent at the same time, and how many requests a load makes. An
            upload holds this many parts in memory, and one more.
        connect_timeout_s: the time limit of a connection.
        request_timeout_s: the time limit of one request with its body. It is then repeated, since a connection may
            stall for ever. `concurrency` parts at once must get through in this time: by default, at 14 Mbit/s.
        retries: how often a request that failed (429, 5xx, a broken connection) is repeated, after a pause. Ten
            take about fifteen seconds.
        retry_timeout_s: after this time, a request that failed is not repeated any more.
        delete_grace_s: how long the data of a deleted step stays, for readers that have opened it. They hold no open
            files there.
        check_conditions: check before the first save that the endpoint honours conditional puts. False: a bucket whose
            endpoint ignores them is accepted. Then no other job must ever save there.
        anonymous: send no credentials, to read a public bucket.
        options: more options of obstore by their names, such as {"virtual_hosted_style_request": "true"}. They may be
            secrets, so they are never shown.

    Raises:
        SettingsError: a value is out of range or of the wrong type.
    """

    endpoint: Annotated[str, endpoint] | None = None
    region: Annotated[str, text] | None = None
    part_bytes: Annotated[int, whole(5 * MIB, GIB)] = 8 * MIB
    concurrency: Annotated[int, whole(1, 64)] = 6
    connect_timeout_s: Annotated[float, seconds] = 10.0
    request_timeout_s: Annotated[float, seconds] = 30.0
    retries: Annotated[int, whole(0, 100)] = 10
    retry_timeout_s: Annotated[float, seconds] = 180.0
    delete_grace_s: Annotated[float, duration] = 600.0
    check_conditions: bool = True
    anonymous: bool = False
    options: Annotated[dict[str, str], texts_by_name] = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_fields("ObjectStoreSettings", self)

    def __hash__(self) -> int:
        """Equal settings have equal hashes: clients are kept by them."""
        plain = [getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "options"]
        return hash((*plain, *sorted(self.options.items())))


def check_object_store(subject: str, value: Any) -> ObjectStoreSettings:
    """Check for an ObjectStoreSettings, or a mapping with its fields."""
    if isinstance(value, ObjectStoreSettings):
        return value
    if not isinstance(value, Mapping):
        refuse(subject, "an ObjectStoreSettings, or a mapping with its fields", type(value).__name__)
    names = [field.name for field in dataclasses.fields(ObjectStoreSettings)]
    try:
        return ObjectStoreSettings(**known_keys(subject, value, names))
    except SettingsError as error:
        raise SettingsError(str(error).replace("ObjectStoreSettings.", f"{subject}.", 1)) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FastTierSettings:
    """A fast tier: a directory on each host, to which a run saves often. An instance checks its values when created.

    Attributes:
        directory: a directory that each host has for itself, on a local disk or in memory (tmpfs).
        interval_steps: save to the fast tier at every multiple of this step. None: not by steps.
        max_fraction: save to the fast tier as often as this fraction of the training time allows, above 0 and below 1;
            see `OverheadBudgetPolicy`. None: not by time. Without `interval_steps`, 0.035.
        redundancy: what protects the files of a host against its loss. "partner": a copy on the next host. "xor":
            parity over up to eight hosts, of which one may be lost. "p+q": the same, and two may be lost. "none":
            nothing; enough if the directory outlives what may fail.
        keep: how many of the newest steps stay on the fast tier.
        max_bytes: keep fewer steps if they take more than this on a host, with what it holds for others. The newest
            one is kept in any case, and one that is being written is not counted. None: no limit.
        failure_domain: processes with equal texts are lost together, so they do not protect each other. None: those on
            one machine.
        address: the address of this host at which it serves its files to the others. None: that of the interface
            through which it reaches process 0.
        port: the port. 0: any free one.
        timeout_s: how many seconds another host may take to answer.
        max_bytes_per_s: how many bytes per second each process may read from other hosts while a step is protected, at
            least 1 MiB; restores are not limited. None: no limit.

    Raises:
        SettingsError: a value is out of range or of the wrong type.
    """

    directory: Annotated[str, local_directory]
    interval_steps: Annotated[int, whole(1)] | None = None
    max_fraction: Annotated[float, fraction] | None = None
    redundancy: Literal["none", "partner", "xor", "p+q"] = "partner"
    keep: Annotated[int, whole(1, 1000)] = 2
    max_bytes: Annotated[int, whole(1, _MOST)] | None = None
    failure_domain: Annotated[str, text] | None = None
    address: Annotated[str, own_address] | None = None
    port: Annotated[int, whole(0, 65535)] = 0
    timeout_s: Annotated[float, seconds] = 30.0
    max_bytes_per_s: Annotated[int, whole(1 << 20, _MOST)] | None = None

    def __post_init__(self) -> None:
        check_fields("FastTierSettings", self)


def check_fast_tier(subject: str, value: Any, base: str = "") -> FastTierSettings | None:
    """Check for a FastTierSettings, a mapping with its fields, or a directory. None: its directory is None.

    A relative directory starts at `base` or at the working directory.
    """
    if isinstance(value, FastTierSettings):
        return value
    if isinstance(value, str | os.PathLike):
        value = {"directory": value}
    if not isinstance(value, Mapping):
        refuse(subject, "a directory, a FastTierSettings, or a mapping with its fields", type(value).__name__)
    names = [field.name for field in dataclasses.fields(FastTierSettings)]
    given = known_keys(subject, value, names)
    if given.get("directory", ...) is None:
        return None
    if "directory" not in given:
        refuse(subject, "the key directory, with a directory of each host", ", ".join(given) or "nothing")
    directory = local_directory(f"{subject}.directory", given["directory"], base)
    try:
        return FastTierSettings(**{**given, "directory": directory})
    except SettingsError as error:
        raise SettingsError(str(error).replace("FastTierSettings.", f"{subject}.", 1)) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """How checkpoints are stored. An instance checks its values when it is created.

    Attributes:
        durability: "full": sync files, directories and the parent before a save is acknowledged. "file": sync files,
            but not directories. "none": sync nothing. Without "full", retention syncs the newest step before it deletes
            older ones, which stay listed until then; this runs in the background, and closing waits for it. A power cut
            during the overwrite of a single checkpoint may then lose both the old and the new one.
        digest: the digest of each block of data: "xxh3-128" (fast), "sha256", or "blake3" (requires the `blake3`
            package).
        verify_on_load: compare the digests of all bytes that a load reads.
        segment_bytes: a segment file is closed before its data exceeds this size, unless a single chunk is larger.
        staging_bytes: host memory for the staging buffers between a snapshot and the disk. It is kept between saves.
        read_budget_bytes: host memory that a load may use in addition to its destination. An array that only passes
            through host memory (on its way to an accelerator, or to be converted) may use its own size if that is
            larger. An array that is assembled from several pieces is counted in addition, at most one for each reading
            thread.
        io_threads: the number of concurrent writes, and half the number of concurrent reads; at most 64. Network
            file systems and arrays of drives are often faster with 4 or 8. Provide 8 MiB of staging buffers for each
            write; otherwise a save may use up to another `staging_bytes`.
        direct_io: True: use `O_DIRECT`, and raise an error if the file system refuses it. False: use the page cache.
            "auto": use `O_DIRECT` if the file system supports it.
        snapshot: how a save protects the state on accelerators from later changes. "host": start copies to pinned host
            memory; if a device has none, wait for copies to other host memory. "device": start copies on the devices,
            which need memory for a second state until it is written. "auto": "device" if the copies certainly fit next
            to the peak memory of the training, otherwise "host". "stream": return once the state has left the devices;
            host memory then holds only the staging buffers, another `staging_bytes` of the state, and the arrays that
            are being written. For state on the CPU, "auto" keeps references instead of copies until it detects that the
            loop donates the state during a save. That training step is slow, because it needs new memory. From then on,
            and with "host", the state is copied into memory that is kept between saves. The save then takes longer, but
            the training step does not.
        nonfinite: what a save does about nan, and about inf in arrays (a single number may be inf). "allow": nothing.
            "warn": log a warning with the names of the leaves. "reject": fail with NonFiniteError, so that the previous
            step stays the newest. The check runs on the devices, and its result is awaited in the background.
        scrub_bytes_per_s: reread the steps of a run in the background, at most this many bytes per second, to find
            damage while other steps are still valid. Damaged steps are set aside. 0: no such reads. Even then, the
            steps saved right before and after a step that was set aside are read once, at up to 64 MiB per second,
            unless the restore has already verified all of them.
        read_once: how the processes of a job read parts of arrays that several of them need. True: each process reads a
            share, and all of them load the same values together. Processes on one machine share the data in memory;
            otherwise it travels over the devices, at most `read_budget_bytes` at a time. False: each process reads
            everything that it needs, and none waits for another. "auto": as True if the job would otherwise read
            clearly more than the checkpoint contains (by a fiftieth and by 64 MiB). If processes on one machine cannot
            share memory, for example in containers, each one reads through the page cache instead.
        index_files: whether each process of a job writes the list of its parts of arrays to a file of its own, instead
            of sending it to process 0. Then a process that loads reads only the lists that it needs. "auto": if there
            are more than 100,000 parts, and more than 16 for each process.
        barrier_timeout_s: in a multi-process job, the time to wait for another process that makes no progress or is
            gone. The save or load then fails in all processes.
        colocated: whether the hosts of the devices save and load the arrays, through JAX's Colocated Python, instead of
            this process. "auto": if the runtime drives devices of several hosts from one process (Pathways). True:
            always. False: never. Requires `cloudpickle`, and this package and the storage on all hosts.
        object_store: how object stores are reached; an ObjectStoreSettings, or a mapping with its fields.

    Raises:
        SettingsError: a value is out of range or of the wrong type.
    """

    durability: Durability = "full"
    digest: DigestName = "xxh3-128"
    verify_on_load: bool = True
    segment_bytes: _Bytes = 2 * GIB
    staging_bytes: _Bytes = 96 * MIB
    read_budget_bytes: _Bytes = 256 * MIB
    io_threads: Annotated[int, whole(1, MOST_IO_THREADS)] = 2
    direct_io: bool | Literal["auto"] = "auto"
    snapshot: SnapshotMode = "auto"
    nonfinite: NonFinite = "allow"
    scrub_bytes_per_s: Annotated[int, whole(0, _MOST)] = 0
    read_once: bool | Literal["auto"] = "auto"
    index_files: bool | Literal["auto"] = "auto"
    barrier_timeout_s: Annotated[float, seconds] = 300.0
    colocated: Colocated = "auto"
    object_store: Annotated[ObjectStoreSettings, check_object_store] = ObjectStoreSettings()

    def __post_init__(self) -> None:
        check_fields("StoreSettings", self)


def checked_settings(subject: str, settings: Any) -> StoreSettings:
    """Return the given settings, or the defaults for None; raise SettingsError for anything else."""
    if settings is None:
        return StoreSettings()
    if not isinstance(settings, StoreSettings):
        raise SettingsError(
            f"{subject}: expected a StoreSettings, such as jaxckpt_train.StoreSettings(io_threads=4), "
            f"found {type(settings).__name__}"
        )
    return settings
