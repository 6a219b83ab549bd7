"""Real object servers on loopback. Each is installed below build/servers on its first use.

How they differ, seen through obstore and boto3 (`tests/nightly/objects` checks it):

- moto refuses requests that are not signed, and takes some milliseconds for each. All conditions hold.
- versitygw checks signatures. All conditions hold. Here and on moto, completing an upload twice succeeds.
- gofakes3 checks no signature, and ignores If-Match of reads and the conditions of deletions and of completing an
  upload. An update of a missing object answers 412. Reads name a version, writes do not.
- s3rver ignores the conditions of writes and If-Match of reads. A bulk deletion that empties a folder has its effect,
  but answers 500. The range of only the first byte is an error. Incomplete uploads cannot be listed.
- azurite gives each write a new ETag. It ignores `startFrom`: listing with an offset returns earlier keys, too.
"""

from __future__ import annotations

import abc
import base64
import contextlib
import email.utils
import fcntl
import hashlib
import hmac
import http.client
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

import pytest

from tests.support.objects.access import Access, Dialect, Reachable
from tests.support.objects.object_map import BUCKET
from tests.support.paths import REPO_ROOT

FOLDER = REPO_ROOT / "build" / "servers"
INSTALL_LIMIT_S = 1200.0
START_LIMIT_S = 60.0
STOP_LIMIT_S = 5.0
_TRIES = 3  # another process may take the free port first


class RealServer(Reachable, abc.ABC):
    """A server process from `with` to its end, with an empty bucket named "bucket".

    Attributes:
        access: how obstore reaches it; while it runs.
        folder: where it may keep its data; removed at its end.
    """

    name: ClassVar[str]
    version: ClassVar[str]
    dialect: ClassVar[Dialect] = "s3"
    access_key: ClassVar[str] = "account"
    secret_key: ClassVar[str | None] = None

    def __init__(self) -> None:
        self.folder = Path()
        self.access = Access(self.dialect, "")
        self._resources = contextlib.ExitStack()

    @classmethod
    @abc.abstractmethod
    def install(cls) -> str | None:
        """Install the server unless it is there; return why it cannot be had, or None."""

    @abc.abstractmethod
    def command(self, port: int) -> list[str]:
        """Return the command that serves on this port."""

    @abc.abstractmethod
    def create_bucket(self) -> None:
        """Create the bucket once the server answers, unless the command has done so."""

    def __enter__(self) -> Self:
        why_not = self.install()
        if why_not is not None:
            raise RuntimeError(f"{self.name}: {why_not}")
        with contextlib.ExitStack() as resources:
            self.folder = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix=f"{self.name}-")))
            address = self._start(resources)
            account = f"/{self.access_key}" if self.dialect == "azure" else ""
            self.access = Access(self.dialect, address + account, self.access_key, self.secret_key)
            self.create_bucket()
            self._resources = resources.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def _start(self, resources: contextlib.ExitStack) -> str:
        """Start the process, and return its address once it answers."""
        log = self.folder / "log"
        # Servers must not outlive a test process that is killed.
        guard = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        for _ in range(_TRIES):
            port = _free_port()
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [*guard, *self.command(port)],
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            resources.callback(_stop, process)
            if _wait_for_answer(process, port):
                return f"http://127.0.0.1:{port}"
        raise RuntimeError(f"{self.name} does not start:\n{log.read_text(errors='replace')[-2000:]}")


class Moto(RealServer):
    """`moto_server` of this environment."""

    name, version = "moto", "5"
    secret_key = "secret"

    @classmethod
    def install(cls) -> str | None:
        missing = [each for each in ("moto", "flask", "flask_cors") if importlib.util.find_spec(each) is None]
        return f"not installed: {', '.join(missing)}" if missing else None

    def command(self, port: int) -> list[str]:
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]

    def create_bucket(self) -> None:
        _put(f"{self.endpoint}/{BUCKET}", {})


class VersityGw(RealServer):
    """versitygw, which keeps each object in a file below `folder / "data"`, and checks signatures."""

    name, version = "versitygw", "1.8.0"
    access_key, secret_key = "tester", "tester-secret"

    @classmethod
    def install(cls) -> str | None:
        return _install_by_go(cls.name, cls.version, "github.com/versity/versitygw/cmd/versitygw")

    def command(self, port: int) -> list[str]:
        (self.folder / "data" / BUCKET).mkdir(parents=True, exist_ok=True)
        keys = ["--access", self.access_key, "--secret", self.secret_key or ""]
        binary = str(_place(self.name, self.version) / self.name)
        return [binary, "--port", f"127.0.0.1:{port}", *keys, "--keep-alive", "--quiet", "posix", "data"]

    def create_bucket(self) -> None: ...


class GoFakeS3(RealServer):
    """gofakes3, in memory."""

    name, version = "gofakes3", "1.2.0"

    @classmethod
    def install(cls) -> str | None:
        return _install_by_go(cls.name, cls.version, "github.com/johannesboyne/gofakes3/cmd/gofakes3")

    def command(self, port: int) -> list[str]:
        binary = str(_place(self.name, self.version) / self.name)
        return [binary, "-host", f"127.0.0.1:{port}", "-backend", "memory", "-initialbucket", BUCKET]

    def create_bucket(self) -> None: ...


class S3rver(RealServer):
    """s3rver, which ignores the conditions of writes."""

    name, version = "s3rver", "3.7.1"
    access_key, secret_key = "S3RVER", "S3RVER"

    @classmethod
    def install(cls) -> str | None:
        return _install_by_npm(cls.name, cls.version)

    def command(self, port: int) -> list[str]:
        script = _place(self.name, self.version) / "node_modules/s3rver/bin/s3rver.js"
        where = ["--address", "127.0.0.1", "--port", str(port), "--directory", "data"]
        return ["node", str(script), *where, "--no-vhost-buckets", "--silent", "--configure-bucket", BUCKET]

    def create_bucket(self) -> None: ...


class Azurite(RealServer):
    """Microsoft's emulator of Azure Blob Storage, in memory."""

    name, version = "azurite", "3.35.0"
    dialect = "azure"
    secret_key = base64.b64encode(b"tester-secret").decode()

    @classmethod
    def install(cls) -> str | None:
        return _install_by_npm(cls.name, cls.version)

    def command(self, port: int) -> list[str]:
        script = _place(self.name, self.version) / "node_modules/azurite/dist/src/blob/main.js"
        account = f"AZURITE_ACCOUNTS={self.access_key}:{self.secret_key}"
        where = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence"]
        return ["env", account, "node", str(script), *where, "--disableTelemetry", "--skipApiVersionCheck", "--silent"]

    def create_bucket(self) -> None:
        headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
        # https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key
        resource = f"/{self.access_key}/{self.access_key}/{BUCKET}\nrestype:container"
        signed = "\n".join(["PUT", *[""] * 11, *(f"{name}:{value}" for name, value in headers.items()), resource])
        key = base64.b64decode(self.secret_key)
        signature = base64.b64encode(hmac.digest(key, signed.encode(), hashlib.sha256)).decode()
        headers["Authorization"] = f"SharedKey {self.access_key}:{signature}"
        _put(f"{self.endpoint}/{BUCKET}?restype=container", headers)


class FakeGcs(RealServer):
    """fake-gcs-server, an emulator of Google Cloud Storage in memory.

    It speaks the JSON API and obstore the XML API, so it is for the peers of benchmarks alone, and not in `SERVERS`.
    """

    name, version = "fake-gcs-server", "1.56.1"
    dialect = "gcs"

    @classmethod
    def install(cls) -> str | None:
        return _install_by_go(cls.name, cls.version, "github.com/fsouza/fake-gcs-server")

    def command(self, port: int) -> list[str]:
        binary = str(_place(self.name, self.version) / self.name)
        where = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
        return [binary, *where, "-backend", "memory", "-log-level", "error"]

    def create_bucket(self) -> None:
        _send("POST", f"{self.endpoint}/storage/v1/b?project=test", {}, f'{{"name": "{BUCKET}"}}')


@contextlib.contextmanager
def started_or_skipped(name: str) -> Iterator[RealServer]:
    """Start a server; skip the test if it cannot be had."""
    kind = SERVERS[name]
    if (why_not := kind.install()) is not None:
        pytest.skip(f"{kind.name}: {why_not}")
    with kind() as server:
        yield server


SERVERS: dict[str, type[RealServer]] = {each.name: each for each in (Moto, VersityGw, GoFakeS3, S3rver, Azurite)}


def _place(name: str, version: str) -> Path:
    return FOLDER / f"{name}-{version}"


def _install_by_go(name: str, version: str, package: str) -> str | None:
    place = _place(name, version)
    part = _unfinished(place)
    return _install(place, ["env", f"GOBIN={part}", "go", "install", f"{package}@v{version}"])


def _install_by_npm(name: str, version: str) -> str | None:
    place = _place(name, version)
    flags = ["--ignore-scripts", "--no-audit", "--no-fund"]
    return _install(place, ["npm", "install", "--prefix", str(_unfinished(place)), *flags, f"{name}@{version}"])


def _unfinished(place: Path) -> Path:
    return place.with_name(f"{place.name}.part")


def _install(place: Path, command: list[str]) -> str | None:
    """Run a command that fills the unfinished place, unless the place is there; return why that failed, or None."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(f"{place}.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # parallel test workers install once
        if place.exists():
            return None
        tool = next(each for each in command if each in ("go", "npm"))
        if shutil.which(tool) is None:
            return f"{tool} is not on this machine"
        part = _unfinished(place)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        try:
            done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"{tool} takes longer than {INSTALL_LIMIT_S:g} s to install it"
        if done.returncode != 0:
            return f"{tool} cannot install it: {done.stderr.strip()[-500:]}"
        part.rename(place)
    return None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _wait_for_answer(process: subprocess.Popen[bytes], port: int) -> bool:
    """Wait for the first HTTP response of a server; return False if it ends before."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_LIMIT_S)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/")
            connection.getresponse()
            return True
        time.sleep(0.05)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group, of which it is the leader."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_LIMIT_S)


def _put(url: str, headers: dict[str, str]) -> None:
    _send("PUT", url, {"Content-Length": "0", **headers})


def _send(method: str, url: str, headers: dict[str, str], body: str | None = None) -> None:
    parts = urllib.parse.urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(parts.netloc, timeout=START_LIMIT_S)) as connection:
        connection.request(method, f"{parts.path}?{parts.query}", body, headers)
        response = connection.getresponse()
        if response.status >= 300:
            raise RuntimeError(f"{method} {url}: {response.status} {response.read()[:500]!r}")
