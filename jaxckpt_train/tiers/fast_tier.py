"""The fast tier of a run, as one process of its job uses it.

Every host has a directory of its own. A step of the fast tier has one name on all hosts; each host has the manifest,
COMMIT and the layout of the step, the files of its own processes, and copies or parity of others' files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import logging
import secrets
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from jaxckpt_train.distributed.coordinator import Coordinator
from jaxckpt_train.errors import CheckpointError, SettingsError, StorageError
from jaxckpt_train.settings import FastTierSettings
from jaxckpt_train.store.backends.base import GONE, Opener, Source, is_damage, storage_error
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.backends.peers import FileServer, Peer, address_among, local_address
from jaxckpt_train.store.committed import read_committed
from jaxckpt_train.store.manifest import COMMIT_NAME
from jaxckpt_train.store.process_identity import machine_id
from jaxckpt_train.store.removal import file_sizes
from jaxckpt_train.store.timeouts import report_progress, time_limited
from jaxckpt_train.tiers.host_files import HeldStep, HostFiles, Name
from jaxckpt_train.tiers.hosts import Host, Hosts, Protection

TOKEN_BYTES, MARK_BYTES = 32, 8
_MARK = ".host-"
_LOSSES = {"none": 0, "partner": 1, "xor": 1, "p+q": 2}
_log = logging.getLogger("jaxckpt_train")


class FastTier:
    """The fast tier of a run. All processes of the job make one, and call its methods in the same order.

    Args:
        run_directory: the directory of the run. Each run has a folder of its own, so that runs may share a disk.

    Attributes:
        directory: its folder on this host.
        files: its files, on all hosts.
        hosts: the hosts of the job; after `join`.
        protection: who keeps what of whom; after `join`.
        limit: what this process may read from other hosts while steps are protected.
        newest: the name of the step that this job has saved last, since it last looked; empty: none.
    """

    def __init__(self, settings: FastTierSettings, run_directory: str) -> None:
        folder = hashlib.blake2b(run_directory.encode(errors="surrogatepass"), digest_size=8).hexdigest()
        if f"{settings.directory}/".startswith(f"{run_directory}/"):
            raise SettingsError(
                f"fast_tier.directory: expected a directory outside of that of the run, {run_directory}, found "
                f"{settings.directory}"
            )
        self.settings, self.directory = settings, f"{settings.directory}/run-{folder}"
        self.files, self.limit = HostFiles(self.directory), RateLimit(settings.max_bytes_per_s)
        self.hosts, self.protection = Hosts([Host(0, "")]), Protection("none", {}, ())
        self._process, self._has_joined, self.newest = 0, False, ""
        self._peers: dict[int, Peer] = {}
        self._held: dict[int, list[HeldStep]] = {}
        self._server: FileServer | None = None

    def join(self, job: Coordinator, coordinator_address: str | None) -> None:
        """Find the other hosts, and serve the files of this one to them; done once."""
        if self._has_joined:
            return
        self._process = job.process
        machine = machine_id()
        domain = self.settings.failure_domain or machine

        def make() -> bytes:
            try:
                self.files.make_directory(self.directory, parents=True, sync=False)
            except StorageError as error:
                what = "create the directory of the fast tier"
                raise storage_error(error.errno or errno.EIO, what, self.directory) from error
            towards = coordinator_address or "127.0.0.1"
            return b"" if job.processes == 1 else (self.settings.address or local_address(towards)).encode()

        def draw(values: Sequence[bytes]) -> bytes:
            return msgspec.msgpack.encode((secrets.token_bytes(TOKEN_BYTES), secrets.token_hex(MARK_BYTES), values))

        drawn = job.exchange("joining the fast tier", make, draw)
        if job.processes == 1:
            self.hosts, self._has_joined = Hosts([Host(0, domain, machine, self.directory)]), True
            return
        token, mark, addresses = msgspec.msgpack.decode(drawn, type=tuple[bytes, str, list[bytes]])

        def serve() -> bytes:
            host = address_among([each.decode() for each in addresses], job.process)
            self._server = FileServer(self.directory, token, host, self.settings.port)
            weakref.finalize(self, self._server.close).atexit = False
            address, redundancy = self._server.address, self.settings.redundancy
            return msgspec.msgpack.encode(Host(job.process, domain, machine, self.directory, address, redundancy))

        found = job.exchange("finding the hosts of the fast tier", serve, msgspec.msgpack.encode)
        hosts = [msgspec.msgpack.decode(each, type=Host) for each in msgspec.msgpack.decode(found, type=list[bytes])]
        self.hosts = Hosts(hosts)
        self._refuse_mixed_redundancy()
        self._refuse_divided_hosts()
        self._refuse_shared_directory(job, mark)
        self._peers = {
            each.process: Peer(each.process, each.address, token, self.settings.timeout_s)
            for each in hosts
            if each.address is not None and each.process != job.process
        }
        self.protection = self.hosts.protection(self.settings.redundancy)
        if job.process == 0 and self.protection.survives() < _LOSSES[self.settings.redundancy]:
            _log.warning(
                "%s: redundancy=%r needs more failure domains than %d: %sa step of this job survives the loss of %d",
                self.directory,
                self.settings.redundancy,
                self.hosts.domains,
                "copies take the place of parity, and " if self.protection.copies else "",
                self.protection.survives(),
            )
        self._has_joined = True

    def _refuse_mixed_redundancy(self) -> None:
        first = self.hosts.all[0].redundancy
        for each in self.hosts.all:
            if each.redundancy != first:
                raise SettingsError(
                    f"fast_tier: process 0 has redundancy={first!r}, but process {each.process} has "
                    f"redundancy={each.redundancy!r}: all processes of a job must have the same"
                )

    def _refuse_divided_hosts(self) -> None:
        found = self.hosts.divided_host()
        if found is not None:
            other = self.hosts.all[self.hosts.leader(found.process)]
            raise SettingsError(
                f"fast_tier: processes {other.process} and {found.process} are on one host ({found.domain}), but have "
                f"the directories {other.directory} and {found.directory}: give them one directory, or another "
                "failure_domain if they are not lost together"
            )

    def _refuse_shared_directory(self, job: Coordinator, drawn: str) -> None:
        """Raise SettingsError if several hosts have one directory. Each host leaves a mark, and looks for others.

        `drawn`: random, the same in all processes. Other users may see it, so it must say nothing about the token.
        """
        mark = f"{_MARK}{drawn}-{job.process}"

        def leave() -> bytes:
            if self.is_leader:
                self.files.write_new(f"{self.directory}/{mark}", b"")
            return b""

        def look() -> bytes:
            names = [entry.name for entry in self.files.list(self.directory) if entry.name.startswith(_MARK)]
            if f"{_MARK}{drawn}-{self.hosts.leader(job.process)}" not in names:
                raise SettingsError(
                    f"fast_tier: {self.directory}: processes {self.hosts.leader(job.process)} and {job.process} are on "
                    "one machine, but do not see the same directory (containers?): give each container a "
                    "failure_domain of its own"
                )
            if self.is_leader and any(name.startswith(f"{_MARK}{drawn}") and name != mark for name in names):
                raise SettingsError(
                    f"fast_tier: {self.directory} is shared by several hosts: choose a directory that each host has "
                    "for itself, on a local disk or in memory"
                )
            return b""

        def forget() -> bytes:
            for entry in self.files.list(self.directory) if self.is_leader else ():
                if entry.name.startswith(_MARK):  # also those of a job that was killed here
                    self.files.remove(f"{self.directory}/{entry.name}")
            return b""

        for act in (leave, look, forget):
            job.exchange("comparing the directories of the fast tier", act)

    @property
    def is_leader(self) -> bool:
        """Whether this process does what is done once for each host."""
        return self.hosts.leader(self._process) == self._process

    def holder(self, name: str, files: Sequence[Name]) -> int | None:
        """The first process of a host that has these files of a step; None: none has all of them."""
        paths = {path for path, _ in files}
        return next(
            (
                each
                for each, steps in self._held.items()
                if any(step.name == name and paths <= set(step.files) for step in steps)
            ),
            None,
        )

    def host_bytes(self) -> dict[str, int]:
        """What each step takes on the host on which it takes most, as of the last look."""
        found = dict[str, int]()
        for step in (step for steps in self._held.values() for step in steps):
            found[step.name] = max(found.get(step.name, 0), sum(step.files.values()))
        return found

    def bytes_of(self, name: str) -> int:
        """What a directory takes on this host."""
        return sum(file_sizes(LocalBackend(), f"{self.directory}/{name}").values())

    def peer(self, process: int) -> Peer:
        """The files that another process serves."""
        return self._peers[process]

    def opener(self, process: int) -> Opener:
        """Opens files of another process's host, in directories below that of the fast tier, for copies with checks."""
        return _PeerOpener(self._peers[process])

    @time_limited
    def fetch(self, process: int, path: str, size: int) -> bytes:
        """Read a whole file of the host of a process."""
        data = np.empty(size, np.uint8)
        if process == self._process:
            folder, _, name = path.rpartition("/")
            with contextlib.closing(self.files.open(f"{self.directory}/{folder}", name, direct=False)) as source:
                source.read_into(0, data, size)
        else:
            self._peers[process].read_into(path, 0, data)
        return data.tobytes()

    def look(self, job: Coordinator) -> dict[str, bool]:
        """Find out which steps the hosts have, in all processes.

        Returns:
            Their names, and whether some host has an intact manifest and COMMIT.
        """
        give = functools.partial(self._encoded_steps, job.process)
        answer = job.exchange("looking at the fast tier", give, msgspec.msgpack.encode)
        sent = msgspec.msgpack.decode(answer, type=list[bytes])
        held = [msgspec.msgpack.decode(each, type=list[HeldStep]) for each in sent]
        leader = self.hosts.leader(job.process)
        self._held = {each: held[each] for each in self.hosts.leaders()}
        others = {self._peers[each]: held[each] for each in self.hosts.leaders() if each != leader}
        self.files.know(held[leader], others)
        self.newest = ""  # what is here may be damaged
        intact = {step.name for steps in held for step in steps if step.is_intact}
        return {name: name in intact for name in sorted({step.name for steps in held for step in steps})}

    def _encoded_steps(self, process: int) -> bytes:
        steps = self._steps_here() if self.hosts.leader(process) == process else []
        return msgspec.msgpack.encode(steps)

    @time_limited
    def _steps_here(self) -> list[HeldStep]:
        """The steps of which this host has files."""
        found = list[HeldStep]()
        for entry in self.files.list(self.directory):
            path = f"{self.directory}/{entry.name}"
            if entry.kind != "directory" or not entry.name.startswith("step-") or not _is_text(entry.name):
                continue
            is_intact = False
            try:
                is_intact = read_committed(LocalBackend(), path) is not None  # only what is here
            except CheckpointError as error:
                if not is_damage(error):
                    raise
                is_alone = len(self.hosts.leaders()) == 1
                what = "the step is ignored" if is_alone else "another host may have an intact manifest"
                _log.warning("%s: %s; %s", path, error, what)
            sizes = file_sizes(LocalBackend(), path, raises=True)
            found.append(HeldStep(entry.name, is_intact, {file: sizes[file] for file in sizes if _is_text(file)}))
            report_progress()
        return found

    @time_limited
    def clean(self) -> None:
        """Remove what interrupted saves have left on this host. Only for the owner of the run, before it saves.

        A step without COMMIT stays: another host may have it, and need the files that are here.
        """
        for entry in self.files.list(self.directory) if self.is_leader else ():
            if entry.kind == "directory" and entry.name.startswith(".step-"):
                self.files.remove(f"{self.directory}/{entry.name}")
                report_progress()

    def remove_interrupted(self) -> None:
        """Remove the steps without COMMIT on any host, as of the last look: their removal was interrupted."""
        every = [step for steps in self._held.values() for step in steps]
        there = {step.name for step in every if COMMIT_NAME in step.files}
        if self.is_leader:
            self.remove(sorted({step.name for step in every} - there))

    def remove(self, names: Sequence[str]) -> None:
        """Remove steps from this host, COMMIT first; a refusal is only logged."""
        for name in names:
            path = f"{self.directory}/{name}"
            try:
                self.files.remove(f"{path}/{COMMIT_NAME}")
                self.files.remove(path)
            except StorageError as error:
                if error.errno not in GONE:
                    _log.warning("%s could not be removed: %s", path, error)

    def close(self) -> None:
        """Stop serving files."""
        if self._server is not None:
            self._server.close()
        for peer in self._peers.values():
            peer.close()


def _is_text(name: str) -> bool:
    """Whether a name is valid Unicode. Others can be left by a damaged disk, and no save writes them."""
    return name == name.encode(errors="ignore").decode()


class RateLimit:
    """Lets threads of this process pass a number of bytes per second, all together; None: any number."""

    def __init__(self, per_s: int | None) -> None:
        self._per_s, self._lock, self._free_at = per_s, threading.Lock(), 0.0

    def wait(self, nbytes: int) -> None:
        """Wait until bytes may pass."""
        if self._per_s is None:
            return
        with self._lock:
            now = time.monotonic()
            start = max(now, self._free_at)
            self._free_at = start + nbytes / self._per_s
        time.sleep(start - now)


@dataclasses.dataclass(frozen=True)
class _PeerOpener:
    peer: Peer

    def open(self, directory: str, name: str, *, direct: bool | Literal["auto"]) -> Source:
        return self.peer.open(f"{directory}/{name}", is_unchecked=True)
