"""The backend of object stores: S3, Google Cloud Storage and Azure, through obstore.

A path is a URL, such as `s3://bucket/run`. Objects never change, except for records, which are replaced only by
conditional puts. Nothing is renamed. All network access is in this module, and so are its time limits and retries.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import logging
import mmap
import os
import re
import secrets
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from jaxckpt_train.errors import CorruptCheckpointError, SettingsError, StorageError
from jaxckpt_train.settings import KIB, ObjectStoreSettings
from jaxckpt_train.store.backends.base import Entry, StoredRecord, storage_error
from jaxckpt_train.store.threads import PerProcess, shared_workers
from jaxckpt_train.store.timeouts import report_progress

if TYPE_CHECKING:  # `jaxckpt --help` imports this module, and needs neither
    import numpy as np
    from obstore import UpdateVersion
    from obstore.store import ObjectStore

_log = logging.getLogger("jaxckpt_train")
FIRST_BYTES = 256 * KIB
"""How much of a small file is read when it is opened, so that most of them take one request."""
ROUNDS_AT_ONCE = 4
"""How often the concurrent requests of one read are renewed: the next read waits for the last of them."""
MAX_RECORD_BYTES = 64 << 20
_DELETED_AT_ONCE = 1000
_SCHEMES = {"s3": "s3", "gs": "gs", "az": "azure"}
_QUERY = re.compile(r"\?[^\s\"'<>)]*")
_USER = re.compile(r"://[^\s/]*@")
# The body of a response may repeat the request with its credentials.
_BODY = re.compile(r"<(\?xml|Error|html)\b.*", re.DOTALL | re.IGNORECASE)
_REASON = re.compile(r"<(Code|Message)>([^<]*)</\1>")
_SECRET = re.compile(
    r"(?i)(authorization|signature|credential|token|password|secret|access.?key)"
    r"([^\s,;]*[\s]*[=:]\s*)([\"']?(basic|bearer|sharedkey)\s+)?[^\s,;]+"
)


class _Header(msgspec.Struct):
    """The first line of a record. The nonce makes each version different: an S3 ETag is a digest of the content."""

    version: int
    nonce: str


class _Found(NamedTuple):
    header: _Header
    data: bytes
    token: UpdateVersion  # of the object, for a conditional put
    modified: datetime.datetime
    problem: str | None


class _Place(NamedTuple):
    """An object or a prefix: its store, and the key in it."""

    store: ObjectStore
    key: str


class _Clients:
    """The clients of this process, by bucket, settings, and the variables of the environment that obstore reads.

    A forked child must not use those of its parent.
    """

    def __init__(self) -> None:
        self._owner: int | None = None  # the process that has used obstore
        self._made = PerProcess[tuple[str, ObjectStoreSettings, str], Any](_new_client)
        self.probed: list[ObjectStore] = []  # those whose endpoint is known to honour conditions

    def get(self, bucket: str, settings: ObjectStoreSettings) -> ObjectStore:
        """The client of a bucket.

        Raises StorageError in a child that was forked after its parent had used obstore: its calls would never return.
        """
        if self._owner not in (None, os.getpid()):
            raise StorageError(
                errno.ENOTSUP,
                f"cannot be used in a forked child of process {self._owner}, which has used an object store: start the "
                'process by multiprocessing.get_context("spawn")',
                bucket,
            )
        found: ObjectStore = self._made.get((bucket, settings, _environment()))
        self._owner = os.getpid()
        return found


def _environment() -> str:
    """A digest of the variables that obstore reads: a user may correct them after an error."""
    found = sorted(item for item in os.environ.items() if item[0].startswith(("AWS_", "GOOGLE_", "AZURE_")))
    return hashlib.sha256(repr(found).encode(errors="surrogateescape")).hexdigest()


def _new_client(key: tuple[str, ObjectStoreSettings, str]) -> ObjectStore:
    bucket, settings, _ = key
    from obstore.store import AzureStore, GCSStore, S3Store

    scheme, _, name = bucket.partition("://")
    kind: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[scheme]
    # Not in `client_options`, for whose sake obstore would ignore AWS_ALLOW_HTTP and its like.
    config = {"timeout": f"{settings.request_timeout_s}s", "connect_timeout": f"{settings.connect_timeout_s}s"}
    config |= settings.options
    if settings.endpoint is not None:
        config[_ENDPOINT_OPTION[scheme]] = settings.endpoint
    variables = {each: value for each in _ENDPOINT_VARIABLES[scheme] if (value := os.environ.get(each))}
    for variable, value in variables.items():
        if not value.startswith(("http://", "https://")):  # obstore would panic
            raise SettingsError(f"{variable}: expected a URL with http:// or https://, found one without: correct it")
    if any(each.startswith("http://") for each in (settings.endpoint or "", *variables.values())):
        config["allow_http"] = "true"
    if settings.region is not None and scheme == "s3":
        config["region"] = settings.region
    if settings.anonymous:
        config["skip_signature"] = "true"
    retries = {
        "max_retries": settings.retries,
        "retry_timeout": datetime.timedelta(seconds=settings.retry_timeout_s),
        "backoff": _PAUSES,
    }
    try:
        return kind(name, config=config, retry_config=retries)  # type: ignore[no-any-return]
    except Exception as error:  # noqa: BLE001  # obstore's errors have no common type that says "wrong setting"
        raise SettingsError(f"{bucket}: object_store: {_shown(error)}") from None


# Pauses are drawn between the first one and twice the one before. obstore begins with 0.1 s, and has used up ten
# retries after two or three seconds, before a server has restarted.
_PAUSES = {
    "init_backoff": datetime.timedelta(milliseconds=500),
    "max_backoff": datetime.timedelta(seconds=15),
    "base": 2,
}
_ENDPOINT_OPTION = {"s3": "endpoint", "gs": "base_url", "az": "endpoint"}
_ENDPOINT_VARIABLES = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_REGION_VARIABLES = ("AWS_REGION", "AWS_DEFAULT_REGION")
_clients = _Clients()
_REFUSED = re.compile("status code: 40[13] ")
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound")


def _shown(error: BaseException) -> str:
    """The first line of an error of obstore, without queries and values that may be secrets."""
    text = str(error).split("\n\nDebug source", 1)[0]
    text = _BODY.sub(lambda body: ": ".join(part for _, part in _REASON.findall(body[0])) or "...", text)
    line = " ".join(text.split())[:500] or type(error).__name__
    return _SECRET.sub(r"\1\2...", _QUERY.sub("?...", _USER.sub("://", line)))


@contextlib.contextmanager
def _storage_errors(action: str, path: str) -> Iterator[None]:
    """Turn an error of obstore into a StorageError that names the action, the path and what to do."""
    from obstore import exceptions

    try:
        yield
    except (StorageError, CorruptCheckpointError, SettingsError):
        raise
    except (exceptions.NotFoundError, FileNotFoundError) as error:
        _refuse_missing_bucket(error, action, path)
        raise storage_error(errno.ENOENT, action, path) from _without_secrets(error)
    except exceptions.AlreadyExistsError as error:
        raise storage_error(errno.EEXIST, action, path) from _without_secrets(error)
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        reason = f"the credentials were refused: {_shown(error)}"
        raise StorageError(errno.EACCES, f"cannot {action}: {reason}", path) from None
    except ValueError as error:
        raise StorageError(errno.EINVAL, f"cannot {action}: {_shown(error)}", path) from None
    except (exceptions.BaseError, OSError) as error:
        if _REFUSED.search(str(error)):  # of a listing, for which obstore has no error of its own
            reason = f"the credentials were refused: {_shown(error)}"
            raise StorageError(errno.EACCES, f"cannot {action}: {reason}", path) from None
        _refuse_missing_bucket(error, action, path)
        # Not EIO, which a restore takes for a damaged disk, so that it would go back to an older step.
        raise StorageError(errno.ETIMEDOUT, f"cannot {action}: {_shown(error)}", path) from None


def _refuse_missing_bucket(error: BaseException, action: str, path: str) -> None:
    """Raise StorageError if the service says that the bucket is missing: that is no empty prefix."""
    if _NO_BUCKET.search(str(error)):
        bucket = "/".join(path.split("/")[:3])
        reason = f"there is no bucket {bucket}: create it, or correct its name"
        raise StorageError(errno.ETIMEDOUT, f"cannot {action}: {reason}", path) from None


def _without_secrets(error: BaseException) -> BaseException:
    return type(error)(_shown(error))


class ObjectBackend:
    """Objects below URLs. `settings` say how the endpoint is reached. Raises SettingsError: obstore is missing."""

    def __init__(self, settings: ObjectStoreSettings) -> None:
        try:
            import obstore  # noqa: F401
        except ImportError as error:
            raise SettingsError(
                "URLs of object stores need the package obstore, found none: pip install 'jaxckpt-train[objects]'"
            ) from error
        self._settings = settings
        self._seen: dict[str, tuple[int, UpdateVersion]] = {}  # the newest known version of each record

    def _at(self, path: str) -> _Place:
        scheme, _, rest = path.partition("://")
        bucket, _, key = rest.partition("/")
        if scheme not in _SCHEMES or not bucket:
            raise SettingsError(
                f"{path}: expected a URL such as s3://bucket/run, gs://bucket/run or az://container/run"
            )
        return _Place(_clients.get(f"{scheme}://{bucket}", self._settings), key.strip("/"))

    def create(self, path: str, *, direct: bool | Literal["auto"]) -> _Upload:
        """Create an object. It appears when it is finished."""
        return _Upload(path, self._at(path), self._settings)

    def open(self, directory: str, name: str, *, direct: bool | Literal["auto"]) -> _ObjectSource:
        """Open an object, and read its beginning: a small one takes no other request."""
        import obstore

        path, first = f"{directory}/{name}", b""
        with _storage_errors("open the object", path):
            store, key = self._at(path)
            try:
                result = obstore.get(store, key, options={"range": (0, FIRST_BYTES)})
                found, first = result.meta, bytes(result.bytes())
            except Exception as error:  # an empty object has no first byte
                if isinstance(error, (FileNotFoundError, PermissionError)):
                    raise
                found = obstore.head(store, key)
                if found["size"]:
                    raise
            return _ObjectSource(path, _Place(store, key), found["size"], found["last_modified"], first, self._settings)

    def write_new(self, path: str, data: bytes) -> bool:
        """Create a small object with this content; False if the name is taken."""
        with _storage_errors("create the object", path):
            return _put_on_condition(self._at(path), data, "create", self._settings.retries) is not None

    def read_small(self, path: str, limit: int) -> bytes | None:
        """The content of a small object; None: there is none. Raises CorruptCheckpointError: it is too large."""
        import obstore

        with _storage_errors("read the object", path):
            store, key = self._at(path)
            try:
                found = obstore.get(store, key)
            except FileNotFoundError:
                return None
            if found.meta["size"] > limit:
                raise CorruptCheckpointError(f"{path}: {found.meta['size']} bytes, expected at most {limit}")
            return bytes(found.bytes())

    def replace(self, path: str, data: bytes, before: bytes) -> bool:
        """Replace the content `before` of a small object by `data`; False: it has other content, or is gone."""
        import obstore

        with _storage_errors("replace the object", path):
            place = self._at(path)
            try:
                found = obstore.get(*place)
            except FileNotFoundError:
                return False
            now = bytes(found.bytes()) if found.meta["size"] in (len(before), len(data)) else None
            if now != before:
                return now == data  # the first put has arrived late
            return _put_on_condition(place, data, _token(found.meta), self._settings.retries) is not None

    def clone(self, source: str, target: str, size: int) -> bool:
        """Let the service copy an object, whose size only a request would tell; False: it did not, for any reason."""
        import obstore

        (store, key), (other, new) = self._at(source), self._at(target)
        try:
            if store is other:
                obstore.copy(store, key, new)
            return store is other
        except Exception as error:  # noqa: BLE001  # the caller writes the object itself, and learns then what is wrong
            _log.debug("%s was not copied: %s", source, _shown(error))
            return False

    def list(self, path: str) -> list[Entry]:
        """The objects and prefixes below a prefix, sorted by name."""
        import obstore
        from obstore import exceptions

        with _storage_errors("list the prefix", path):
            store, key = self._at(path)
            try:
                found = obstore.list_with_delimiter(store, key or None)
            except exceptions.GenericError as error:
                # obstore repeats a request that fails, but not one whose answer breaks off.
                if not self._settings.retries or "response body" not in str(error):
                    raise
                found = obstore.list_with_delimiter(store, key or None)
        entries = [Entry(prefix.rpartition("/")[2], "directory") for prefix in found["common_prefixes"]]
        entries += [Entry(meta["path"].rpartition("/")[2], "file") for meta in found["objects"]]
        if not entries and key:
            raise storage_error(errno.ENOENT, "list the prefix", path)
        return sorted(entries, key=lambda entry: entry.name)

    def kind(self, path: str) -> Literal["file", "directory"] | None:
        """What is at a path: an object, a prefix of others, or nothing."""
        import obstore

        with _storage_errors("look at the object", path):
            store, key = self._at(path)
            if not key:
                return "directory"
            with contextlib.suppress(FileNotFoundError):
                obstore.head(store, key)
                return "file"
            for _ in obstore.list(store, f"{key}/", chunk_size=1):
                return "directory"
        return None

    def make_directory(self, path: str, *, parents: bool, sync: bool) -> None:
        """Do nothing: prefixes exist with their objects."""

    def sync(self, path: str) -> None:
        """Do nothing: an object is durable when its put has returned."""

    def remove(self, path: str) -> None:
        """Remove an object, or all objects below a prefix."""
        import obstore

        with _storage_errors("remove", path):
            store, key = self._at(path)
            with contextlib.suppress(FileNotFoundError):
                obstore.delete(store, key)
            for found in obstore.list(store, f"{key}/", chunk_size=_DELETED_AT_ONCE):
                with contextlib.suppress(FileNotFoundError):  # another process removes it, too
                    obstore.delete(store, [each["path"] for each in found])
                report_progress()

    def remove_objects(self, paths: Sequence[str]) -> None:
        """Remove objects of one bucket, many in one request."""
        import obstore

        for at in range(0, len(paths), _DELETED_AT_ONCE):
            places = [self._at(path) for path in paths[at : at + _DELETED_AT_ONCE]]
            with _storage_errors("remove", paths[at]), contextlib.suppress(FileNotFoundError):
                obstore.delete(places[0].store, [place.key for place in places])

    def read_record(self, path: str) -> StoredRecord | None:
        """The newest version of a record; None: there is none."""
        found = self._read(path)
        if found is None:
            return None
        # The clock of the storage has full seconds; the nonce distinguishes refreshes within one.
        digest = int.from_bytes(hashlib.sha256(found.header.nonce.encode()).digest()[:4]) % 10**9
        at_ns = int(found.modified.timestamp()) * 10**9 + digest
        return StoredRecord(found.header.version, found.data, at_ns, found.problem)

    def _read(self, path: str) -> _Found | None:
        import obstore

        with _storage_errors("read the record", path):
            store, key = self._at(f"{path}.json")
            try:
                got = obstore.get(store, key)
            except FileNotFoundError:
                return None
            meta, problem = got.meta, None
            if meta["size"] > MAX_RECORD_BYTES:
                problem, content = f"{path}: {meta['size']} bytes, expected at most {MAX_RECORD_BYTES}", b""
            else:
                content = bytes(got.bytes())
        head, _, data = content.partition(b"\n")
        try:
            header = msgspec.json.decode(head, type=_Header)
        except (msgspec.DecodeError, ValueError):
            header, problem = (
                _Header(0, str(meta["e_tag"])),
                problem or f"{path}: expected a record, found other content",
            )
        token = _token(meta)
        self._seen[path] = header.version, token
        return _Found(header, data, token, meta["last_modified"], problem)

    def swap_record(self, path: str, data: bytes, version: int | None) -> int | None:
        """Replace this version of a record (None: create it), and return the new version; None: another was faster."""
        token: UpdateVersion | None = None
        if version is not None:
            seen = self._seen.get(path)
            if seen is None or seen[0] != version:
                self._read(path)
                seen = self._seen.get(path)
            if seen is None or seen[0] != version:
                return None
            token = seen[1]
        header = _Header((version or 0) + 1, secrets.token_hex(16))
        return header.version if self._write_record(path, header, data, token) else None

    def refresh_record(self, path: str, version: int) -> None:
        """Write this version of a record again, if it is still the newest."""
        found = self._read(path)
        if found is not None and found.header.version == version and found.problem is None:
            self._write_record(path, _Header(version, secrets.token_hex(16)), found.data, found.token)

    def _write_record(self, path: str, header: _Header, data: bytes, token: UpdateVersion | None) -> bool:
        """Put a record on the condition that it has this version; returns whether it was written."""
        self._seen.pop(path, None)
        with _storage_errors("write the record", path):
            content = msgspec.json.encode(header) + b"\n" + data
            mode: Any = "create" if token is None else token
            done = _put_on_condition(self._at(f"{path}.json"), content, mode, self._settings.retries)
        if done is not None:
            self._seen[path] = header.version, _token(done)
        return done is not None

    def kvstore(self, directory: str) -> dict[str, Any]:
        """Describe a prefix for TensorStore. Its credentials are those that it finds in the environment."""
        scheme, _, rest = directory.partition("://")
        bucket, _, key = rest.partition("/")
        settings, place = self._settings, {"bucket": bucket, "path": f"{key}/"}
        retries = {"max_retries": max(1, settings.retries)}
        if scheme == "az":
            raise SettingsError(
                f"{directory}: TensorStore, which reads and writes the arrays of Orbax, has no driver for az://: use a "
                "local directory, and copy it from or to the object store"
            )
        if any("access_key" in name.lower() for name in settings.options):
            raise SettingsError(
                f"{directory}: TensorStore, which reads and writes the arrays of Orbax, takes no credentials from "
                "object_store.options: set the variables of the environment, such as AWS_ACCESS_KEY_ID"
            )
        if scheme == "gs":
            if settings.endpoint is not None:
                raise SettingsError(
                    f"{directory}: TensorStore, which reads and writes the arrays of Orbax, takes its endpoint for "
                    "gs:// from the variable TENSORSTORE_GCS_HTTP_URL only: set it, and not object_store.endpoint"
                )
            return {"driver": "gcs", **place, "gcs_request_retries": retries}
        variables = {name: os.environ.get(name) for name in (*_ENDPOINT_VARIABLES["s3"], *_REGION_VARIABLES)}
        endpoint = settings.endpoint or next(filter(None, map(variables.get, _ENDPOINT_VARIABLES["s3"])), None)
        region = settings.region or next(filter(None, map(variables.get, _REGION_VARIABLES)), "us-east-1")
        found = {"driver": "s3", **place, "aws_region": region, "s3_request_retries": retries}
        found |= {} if endpoint is None else {"endpoint": endpoint}
        return found | ({"aws_credentials": {"type": "anonymous"}} if settings.anonymous else {})

    def probe(self, directory: str) -> None:
        """Check that the endpoint honours conditions, once for each bucket.

        Raises StorageError: it ignores them, or refuses to write. Two processes could then own one run.
        """
        import obstore
        from obstore import exceptions

        client = self._at(directory).store
        # Clients of two endpoints are equal if the environment names both, so the identity counts.
        if not self._settings.check_conditions or any(client is each for each in _clients.probed):
            return
        path = f"{directory}/.jaxckpt-now-{secrets.token_hex(8)}"
        with _storage_errors("write a first object", path):
            place = store, key = self._at(path)
            ignored = []
            first = _put_on_condition(place, b"1" + secrets.token_bytes(8), "create", self._settings.retries)
            try:
                obstore.put(store, key, b"2" + secrets.token_bytes(8), mode="create", use_multipart=False)
                ignored.append("If-None-Match (create only)")
            except exceptions.AlreadyExistsError:
                pass
            _put_on_condition(place, b"3" + secrets.token_bytes(8), _token(first), self._settings.retries)
            try:
                obstore.put(store, key, b"4" + secrets.token_bytes(8), mode=_token(first), use_multipart=False)
                ignored.append("If-Match (replace only this version)")
            except exceptions.PreconditionError:
                pass
            with contextlib.suppress(Exception):  # permission to delete is needed by retention only
                obstore.delete(store, key)
        if ignored:
            raise StorageError(
                errno.ENOTSUP,
                f"the endpoint ignores {' and '.join(ignored)}, so two jobs could overwrite each other: use another "
                "one, or set object_store.check_conditions=False if no other job ever saves there",
                directory,
            )
        _clients.probed.append(store)


def _is_refused(error: Exception, mode: Literal["create"] | UpdateVersion) -> bool:
    """Whether a conditional put failed because its condition did not hold."""
    from obstore import exceptions

    if isinstance(error, FileNotFoundError):
        return mode != "create"  # else it is the bucket that is missing
    return isinstance(error, (exceptions.PreconditionError, exceptions.AlreadyExistsError))


def _token(meta: Any) -> UpdateVersion:
    """The condition "still this version"; a key without a value would be an error."""
    return {key: meta[key] for key in ("e_tag", "version") if meta.get(key) is not None}  # type: ignore[return-value]


def _put_on_condition(place: _Place, data: bytes, mode: Literal["create"] | UpdateVersion, retries: int) -> Any | None:
    """Put an object, and return its new version; None: the condition does not hold.

    A put may have had its effect even if it fails, or if its repetition is refused, so the object is read back. Its
    content must differ from that of any other put. If nothing has changed, it is put once more (unless `retries` is 0),
    because obstore does not repeat a conditional put that has timed out.
    """
    import obstore

    try:
        return obstore.put(*place, data, mode=mode, use_multipart=False)
    except Exception as error:
        now: Any = None  # unknown
        try:
            found = obstore.get(*place)
            if found.meta["size"] == len(data) and bytes(found.bytes()) == data:
                return found.meta
            now = _token(found.meta)
        except FileNotFoundError:
            now = "create"
        except Exception:  # noqa: BLE001  # the error of the put stands
            pass
        if now is not None and _is_refused(error, mode):
            return None
        if retries and now == mode:
            return _put_on_condition(place, data, mode, 0)
        raise error


class _Upload:
    """An object that is being written, from its start to its end: in one put, or in parts."""

    alignment = 1
    in_order = True

    def __init__(self, path: str, place: _Place, settings: ObjectStoreSettings) -> None:
        self._path, self._place, self._settings = path, place, settings
        self._written, self._filled = 0, 0
        # A mapping goes back to the system as soon as obstore has sent it; freed memory of malloc would stay.
        self._part: mmap.mmap | None = None
        self._writer: Any = None
        self._is_closed = False
        self._lock = threading.Lock()

    def write_at(self, offset: int, data: np.ndarray) -> None:
        """Add bytes at the end. They are copied, since obstore keeps what it is given."""
        view, width = memoryview(data).cast("B"), self._settings.part_bytes
        with self._lock, _storage_errors(f"write {len(view)} bytes at {offset}", self._path):
            if self._is_closed or offset != self._written:
                raise StorageError(errno.EINVAL, f"cannot write at {offset} after {self._written} bytes", self._path)
            while view:
                if self._filled == width:
                    self._send()
                self._part = self._part or mmap.mmap(-1, width, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                taken = view[: width - self._filled]
                self._part[self._filled : self._filled + len(taken)] = taken
                self._filled += len(taken)
                self._written, view = self._written + len(taken), view[len(taken) :]

    def _send(self) -> None:
        import obstore

        if self._writer is None:
            width, most = self._settings.part_bytes, self._settings.concurrency
            self._writer = obstore.open_writer(*self._place, buffer_size=width, max_concurrency=most)
        self._writer.write(self._content())
        self._part, self._filled = None, 0
        report_progress()

    def _content(self) -> memoryview:
        return memoryview(self._part or b"")[: self._filled]

    def finish(self, size: int, *, sync: bool) -> None:
        """Complete the object."""
        with self._lock, _storage_errors("finish writing", self._path):
            if size != self._written:
                raise StorageError(errno.EIO, f"{self._written} bytes were written, expected {size}", self._path)
            self._is_closed = True
            if self._writer is None:
                content = bytes(self._content())
                if _put_on_condition(self._place, content, "create", self._settings.retries) is None:
                    raise storage_error(errno.EEXIST, "create the object", self._path)
            else:
                self._send()
                writer, self._writer = self._writer, None
                writer.close()
            self._part = None

    def abandon(self) -> None:
        """Forget what was not finished. obstore cannot abort an upload: a life-cycle rule of the bucket removes it."""
        self._is_closed, self._writer = True, None


class _ObjectSource:
    """An object that is being read. Its name has never stood for other content, except for a record."""

    alignment = 1

    def __init__(
        self,
        path: str,
        place: _Place,
        size: int,
        modified: datetime.datetime,
        first: bytes,
        settings: ObjectStoreSettings,
    ) -> None:
        self._path, self._place, self._settings = path, place, settings
        self.size, self._first = size, first
        self.piece_bytes = ROUNDS_AT_ONCE * settings.concurrency * settings.part_bytes
        self.modified_ns = int(modified.timestamp() * 10**9)

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        """Fill an array by one request, or by several at the same time."""
        import numpy as np

        stop = min(offset + len(data), self.size)
        if stop - offset < needed:
            raise CorruptCheckpointError(f"{self._path}: ends at byte {self.size}, expected more")
        begin, width = max(offset, min(len(self._first), stop)), self._settings.part_bytes
        data[: begin - offset] = np.frombuffer(self._first, np.uint8)[offset:begin]
        spans = [(at, min(at + width, stop)) for at in range(begin, stop, width)]

        def fetch(span: tuple[int, int]) -> None:
            import obstore

            start, end = span
            with _storage_errors(f"read {end - start} bytes at {start}", self._path):
                got = obstore.get_range(*self._place, start=start, end=end)
                if len(got) != end - start:
                    raise CorruptCheckpointError(f"{self._path}: {len(got)} bytes at {start}, expected {end - start}")
                data[start - offset : end - offset] = np.frombuffer(got, np.uint8)
                report_progress()

        if len(spans) <= 1:
            for span in spans:
                fetch(span)
        else:
            shared_workers(self._settings.concurrency, "jaxckpt-get").run_all(fetch, spans)

    def close(self) -> None:
        """Do nothing: nothing is held."""
