"""Save one step to the fast tier: every process writes to its own host, then the hosts protect each other's files.

The phases of `HostSave`, each ended by all processes together: write the own share; copy, or compute parity of, what
other hosts have written, checked against the manifest; publish on each host. A host publishes only once everything is
protected on all hosts. So a step exists as soon as one host has published it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from jaxckpt_train.checkpointables.saving import DIFFERS, BegunSave, CheckpointSave, SaveTarget
from jaxckpt_train.checkpointables.staging import OwnFiles, StagedPart
from jaxckpt_train.checkpointables.unchanged import UnchangedLeaves
from jaxckpt_train.distributed.coordinator import Coordinator, no_result
from jaxckpt_train.errors import CheckpointError, CorruptCheckpointError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import Opener
from jaxckpt_train.store.backends.local import LocalBackend, temporary_folder
from jaxckpt_train.store.committed import Committed, folders_of, open_committed
from jaxckpt_train.store.manifest import MANIFEST_NAME, FileRecord, decode_manifest
from jaxckpt_train.store.process_index import decode_index
from jaxckpt_train.store.timeouts import time_limited
from jaxckpt_train.store.transaction import HostAttempt, Transaction
from jaxckpt_train.store.verify import copy_verified, unchanged_files
from jaxckpt_train.tiers.fast_tier import FastTier
from jaxckpt_train.tiers.host_files import LAYOUT_NAME, Layout, Name, decode_layout, encode_layout, parity_name
from jaxckpt_train.tiers.parity import Kind, Reader, parity_windows, stream_reader

_log = logging.getLogger("jaxckpt_train")


class _Written(msgspec.Struct, array_like=True):
    """What all processes have written: the digest of the manifest, and the sizes of it and of the layout.

    `before`: the step from which some of it was taken over; empty: none.
    """

    sha256: str
    manifest_bytes: int
    layout_bytes: int
    before: str


class HostSave(CheckpointSave):
    """One save to the fast tier, as a process of the job performs it.

    Attributes:
        host_bytes: in the primary, once it is published: what it takes on the host on which it takes most.
    """

    def __init__(
        self,
        job: Coordinator,
        subject: str,
        tier: FastTier,
        settings: StoreSettings,
        unchanged: UnchangedLeaves | None = None,
    ) -> None:
        plain = dataclasses.replace(settings, index_files=False)  # the primary needs all to protect it
        if tier.protection.survives():
            # The disk writes the own share while other hosts read it from the page cache; `_protect` syncs it then.
            plain = dataclasses.replace(plain, durability="none")
            if settings.direct_io == "auto":
                plain = dataclasses.replace(plain, direct_io=False)
        super().__init__(job, subject, tier.files, plain, unchanged)
        self._given = settings
        self._tier, self.host_bytes, self._began_to_protect = tier, 0, 0.0
        self._attempt: HostAttempt | None = None
        self._own_files = list[str]()
        self._is_leader = tier.hosts.leader(job.process) == job.process

    def _sees_all_files(self) -> bool:
        return False

    def _opener_of_taken_files(self) -> Opener | None:
        """Parity must not be computed from wrong bytes, and a restore may have read the copies of other hosts."""
        tier, is_first = self._tier, not self._tier.newest
        has_parity = tier.protection.set_of(self._job.process) is not None
        return tier.files.here() if has_parity or (is_first and len(tier.hosts.leaders()) > 1) else None

    def _begin(self, target: SaveTarget) -> BegunSave:
        begun = super()._begin(target)
        if isinstance(self.transaction, HostAttempt):
            self._attempt = self.transaction
        else:
            root = self._tier.directory
            self._directory, self._final = (
                f"{root}/{os.path.basename(each)}" for each in (self._directory, self._final)
            )
        return begun

    def _write(self) -> bytes:
        if self._attempt is None:  # only here is an error raised in all processes
            self._attempt = HostAttempt(self._backend, self._final, self._given, self._directory)
            self._attempt.add_folders(part.name for part in self.parts)
        return super()._write()

    def _make_committed(self, target: SaveTarget, begun: BegunSave) -> Committed:
        sent = self._write_everywhere(begun, functools.partial(self._list_files, target))
        written, sign = msgspec.msgpack.decode(sent, type=_Written), self.tracker.sign
        protect, self._began_to_protect = functools.partial(self._protect, written), time.perf_counter()
        self._job.exchange(f"protecting {self.subject}", protect, no_result, sign, self.tracker)
        publish = functools.partial(self._record, target)
        done = self._job.exchange(f"publishing {self.subject}", self._publish, publish, sign)
        self._tier.newest = os.path.basename(self._final)
        return self._committed or self._committed_elsewhere(begun, done)

    def _list_files(self, target: SaveTarget, values: Sequence[bytes]) -> bytes:
        """In the primary: write the manifest, and the list of what each process has written."""
        manifest = self._merge(target, values)
        if manifest is None:
            return DIFFERS
        assert self._attempt is not None
        committed = self._attempt.write_manifest(manifest)
        files = dict[int, list[Name]]()
        for process, value in enumerate(values[1:], 1):
            index = decode_index(value)
            segments = [(each.file, each.bytes) for part in index.parts for each in part.segments]
            files[process] = segments + [(each.file, each.bytes) for part in index.parts for each in part.files]
        elsewhere = {path for names in files.values() for path, _ in names}
        every = [(each.file, each.bytes) for each in manifest.segments]
        every += [(each.file, each.bytes) for part in manifest.parts for each in part.files]
        files[0] = [name for name in every if name[0] not in elsewhere]
        protection = self._tier.protection
        kind: Kind = "p+q" if protection.kind == "p+q" else "xor"
        layout = encode_layout(Layout(kind, files, [list(members) for members in protection.sets]))
        self._attempt.write_file(LAYOUT_NAME, layout)
        self._prepared = committed
        before = self._tier.newest if self.times.taken_bytes else ""
        manifest_bytes = self._attempt.manifest_bytes
        return msgspec.msgpack.encode(_Written(committed.manifest_sha256, manifest_bytes, len(layout), before))

    def _protect(self, written: _Written) -> bytes:
        """Keep what this process keeps of other hosts, and sync it and the own share."""
        attempt, tier, process = self._attempt, self._tier, self._job.process
        assert attempt is not None
        name = os.path.basename(self._directory)
        manifest_data = tier.fetch(0, f"{name}/{MANIFEST_NAME}", written.manifest_bytes)
        layout_data = tier.fetch(0, f"{name}/{LAYOUT_NAME}", written.layout_bytes)
        subject = f"{self._directory}/{MANIFEST_NAME}"
        committed = Committed(self._directory, decode_manifest(manifest_data, subject), written.sha256)
        layout = decode_layout(layout_data, f"{self._directory}/{LAYOUT_NAME}")
        if self._is_leader and attempt is not self.transaction:
            kept = attempt.keep_manifest(manifest_data, committed.manifest)
            if kept.manifest_sha256 != written.sha256:
                raise CorruptCheckpointError(f"{subject}: is not what process 0 wrote; check the memory")
            attempt.write_file(LAYOUT_NAME, layout_data)
        attempt.add_folders(folders_of(committed.manifest))  # objects may have written files into folders of their own
        before = self._opened_here(written.before)
        same = {} if before is None else unchanged_files(before, committed)
        for other in tier.protection.copied_by(process):
            paths = {path for path, _ in layout.files[other] if not self._has(path)}
            if before is not None:
                paths -= attempt.take_files(before.directory, {path: same[path] for path in paths & same.keys()})
            source = dataclasses.replace(committed, directory=name)
            direct = self._given.direct_io  # nobody reads a copy soon
            copy_verified(tier.opener(other), source, attempt, self._given, self._read_elsewhere, paths, direct=direct)
        members = tier.protection.set_of(process)
        if members is not None:
            self._write_parity(attempt, layout, members, name)
        self._own_files = [path for path, _ in layout.files[process]]
        attempt.track_files(self._own_files)
        attempt.sync(self._progress)
        attempt.check_before_publishing()
        return b""

    def _opened_here(self, name: str) -> Committed | None:
        """The step of this name on this host."""
        if not name:
            return None
        try:
            return open_committed(LocalBackend(), f"{self._tier.directory}/{name}", is_complete=False)
        except CheckpointError as error:
            _log.warning("%s: all copies are made anew: %s", self.subject, error)
            return None

    def _upload_own_files(self, part: StagedPart, own_files: OwnFiles) -> tuple[FileRecord, ...]:
        """Only the primary writes them, as on a disk that all processes share the last of them does."""
        if self._job.process:
            with temporary_folder() as local:  # the object may meet its peers while it writes
                self._backend.make_directory(f"{local}/{part.name}", parents=False, sync=False)
                own_files.write(Path(local, part.name))
            return ()
        return super()._upload_own_files(part, own_files)

    def _read_elsewhere(self, nbytes: int) -> None:
        self._tier.limit.wait(nbytes)
        self._progress(nbytes)

    def _has(self, path: str) -> bool:
        return self._backend.kind(f"{self._directory}/{path}") == "file"

    def _write_parity(self, attempt: HostAttempt, layout: Layout, members: Sequence[int], name: str) -> None:
        stripes, place = layout.stripes(members), members.index(self._job.process)
        for which, stripe in stripes.held_by(place):
            chunk_of = functools.partial(self._chunk_of, layout, members, name, stripe)
            sink, at = attempt.create_file(parity_name(which, members[stripe])), 0
            try:
                for window in parity_windows(stripes, stripe, which, chunk_of):
                    sink.write_at(at, window)
                    at += len(window)
                sink.finish(at, sync=False)
            finally:
                sink.abandon()

    def _chunk_of(self, layout: Layout, members: Sequence[int], name: str, stripe: int, member: int) -> Reader:
        """Read the chunk of a member in a stripe from the host that has it."""
        peer, names = self._tier.peer(members[member]), layout.files[members[member]]
        start = layout.stripes(members).offset(member, stripe)
        files = [functools.partial(peer.read_into, f"{name}/{path}") for path, _ in names]
        stream = stream_reader([size for _, size in names], files)

        def read(at: int, target: np.ndarray) -> None:
            self._read_elsewhere(len(target))
            stream(start + at, target)

        return read

    def _publish(self) -> bytes:
        """In the first process of each host: make the step exist, and say what it takes there."""
        for path in self._own_files:  # all other hosts have read them
            self._tier.files.forget(f"{self._directory}/{path}")
        if not self._is_leader:
            return b"0"
        assert self._attempt is not None
        _finish(self._attempt)
        return b"%d" % self._tier.bytes_of(os.path.basename(self._final))

    def _record(self, target: SaveTarget, values: Sequence[bytes]) -> bytes:
        self.host_bytes, self.times.commit_s = max(map(int, values)), time.perf_counter() - self._began_to_protect
        self._committed = self._prepared
        return self._done(target, self._prepared)

    def _undo(self, error: BaseException) -> None:
        super()._undo(error)
        if self._attempt is not None and self._attempt is not self.transaction and self._is_leader:
            self._attempt.abort_after(error)


@time_limited
def _finish(attempt: HostAttempt) -> None:
    attempt.finish()


def begin_on_host(
    tier: FastTier, name: str, settings: StoreSettings, before_publishing: Callable[[], None]
) -> Transaction:
    """In the primary: begin an attempt at a step of the fast tier."""
    return HostAttempt(tier.files, f"{tier.directory}/{name}", settings, before_publishing=before_publishing)
