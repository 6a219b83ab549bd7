"""The objects of a stand-in server: one map behind one lock, so that all operations are linearisable."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import threading
import uuid
from collections.abc import Mapping, Sequence

BUCKET = "bucket"


@dataclasses.dataclass(frozen=True)
class Stored:
    """One version of an object.

    Attributes:
        data: its content.
        etag: the MD5 of the content, without quotes; of a multipart upload as S3 computes it: `MD5-of-MD5s-parts`.
        generation: unique and growing over all writes to the map.
        modified: the time of the write, in UTC.
        metadata: response headers that the writer chose, such as the content type.
    """

    data: bytes
    etag: str
    generation: int
    modified: datetime.datetime
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Part:
    """An uploaded part of an object that is not complete yet."""

    data: bytes
    etag: str


@dataclasses.dataclass
class Upload:
    """An incomplete multipart upload; its parts by part number, or by block id on Azure."""

    name: str
    metadata: Mapping[str, str]
    parts: dict[str, Part] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Condition:
    """What the current version must be like for a write to happen; no attribute set: anything.

    Attributes:
        absent: there must be none.
        etag: it must have this ETag.
        generation: it must have this generation.
    """

    absent: bool = False
    etag: str | None = None
    generation: int | None = None

    def holds(self, current: Stored | None) -> bool:
        """Whether the current version satisfies the condition."""
        if self.absent:
            return current is None
        if self.etag is not None and (current is None or current.etag != self.etag):
            return False
        return self.generation is None or (current is not None and current.generation == self.generation)


ALWAYS = Condition()


class ConditionFailedError(Exception):
    """The current version of an object is not the expected one.

    Attributes:
        current: what is there instead; None: nothing.
    """

    def __init__(self, current: Stored | None) -> None:
        super().__init__("condition failed")
        self.current = current


class MissingPartError(Exception):
    """A part to assemble was not uploaded, or has another ETag."""


@dataclasses.dataclass(frozen=True)
class Listing:
    """One page of a listing.

    Attributes:
        objects: key and object, in the order of keys.
        prefixes: what keys with the delimiter after the prefix have in common.
        after: where the next page continues; None: this is the last page.
    """

    objects: list[tuple[str, Stored]]
    prefixes: list[str]
    after: str | None


class ObjectMap:
    """Objects and incomplete uploads of all buckets.

    Attributes:
        content: the current version of each object, by "bucket/key".
        uploads: the incomplete uploads by id; on Azure, the uncommitted blocks by "bucket/key".
        buckets: the existing buckets.
    """

    def __init__(self) -> None:
        self.content: dict[str, Stored] = {}
        self.uploads: dict[str, Upload] = {}
        self.buckets = {BUCKET}
        self._generation = 0
        self._lock = threading.Lock()

    def copy(self) -> ObjectMap:
        """Return an independent map with the objects and uploads of now."""
        copied = ObjectMap()
        with self._lock:
            copied.content = dict(self.content)
            copied.uploads = {
                each: dataclasses.replace(upload, parts=dict(upload.parts)) for each, upload in self.uploads.items()
            }
            copied.buckets = set(self.buckets)
            copied._generation = self._generation
        return copied

    def get(self, name: str) -> Stored | None:
        """Return the current version of an object."""
        with self._lock:
            return self.content.get(name)

    def put(
        self, name: str, data: bytes, metadata: Mapping[str, str] | None = None, condition: Condition = ALWAYS
    ) -> Stored:
        """Write an object.

        Raises:
            ConditionFailedError: the current version is not the expected one.
        """
        etag = _md5(data)
        with self._lock:
            return self._store(name, data, etag, metadata or {}, condition)

    def put_at_once(self, name: str, data: bytes, metadata: Mapping[str, str], condition: Condition) -> Stored:
        """Write an object, and drop its uncommitted blocks as Azure does."""
        stored = self.put(name, data, metadata, condition)
        with self._lock:
            self.uploads.pop(name, None)
        return stored

    def copy_object(self, source: str, target: str, condition: Condition = ALWAYS) -> Stored | None:
        """Copy an object to another name; return None if the source does not exist.

        Raises:
            ConditionFailedError: the current version of the target is not the expected one.
        """
        with self._lock:
            found = self.content.get(source)
            if found is None:
                return None
            return self._store(target, found.data, found.etag, found.metadata, condition)

    def delete(self, name: str, condition: Condition = ALWAYS) -> bool:
        """Delete an object; return whether it existed.

        Raises:
            ConditionFailedError: the current version is not the expected one.
        """
        with self._lock:
            self._check(name, condition)
            return self.content.pop(name, None) is not None

    def list(self, bucket: str, prefix: str, delimiter: str, after: str, limit: int, first: str = "") -> Listing:
        """Return at most `limit` keys and common prefixes that come after `after`, of keys from `first` on."""
        start = len(bucket) + 1
        with self._lock:
            names = sorted(name for name in self.content if name.startswith(f"{bucket}/{prefix}"))
            found = [(name[start:], self.content[name]) for name in names]
        objects: list[tuple[str, Stored]] = []
        prefixes: list[str] = []
        last = after
        for key, stored in found:
            head, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            entry = prefix + head + cut if cut else key
            if entry == last or key <= last or key < first:
                continue
            if len(objects) + len(prefixes) == limit:
                return Listing(objects, prefixes, last)
            last = entry
            if cut:
                prefixes.append(entry)
            else:
                objects.append((key, stored))
        return Listing(objects, prefixes, None)

    def create_upload(self, name: str, metadata: Mapping[str, str]) -> str:
        """Start a multipart upload and return its id."""
        upload_id = uuid.uuid4().hex
        with self._lock:
            self.uploads[upload_id] = Upload(name, metadata)
        return upload_id

    def put_part(self, upload_id: str, number: str, data: bytes) -> Part | None:
        """Add or replace a part; return None if there is no such upload."""
        part = Part(data, _md5(data))
        with self._lock:
            upload = self.uploads.get(upload_id)
            if upload is None:
                return None
            upload.parts[number] = part
        return part

    def stage_block(self, name: str, block_id: str, data: bytes) -> Part:
        """Add an uncommitted block to an object, as Azure's Put Block does."""
        part = Part(data, _md5(data))
        with self._lock:
            self.uploads.setdefault(name, Upload(name, {})).parts[block_id] = part
        return part

    def complete(
        self,
        upload_id: str,
        parts: Sequence[tuple[str, str | None]],
        metadata: Mapping[str, str] | None = None,
        condition: Condition = ALWAYS,
    ) -> Stored | None:
        """Assemble an object of uploaded parts, and end the upload.

        Args:
            upload_id: the id of the upload; on Azure, the name of the object.
            parts: number and expected ETag of each part in order; None: any ETag.
            metadata: replaces that of the start of the upload.
            condition: what the current version must be like.

        Returns:
            The object; None: there is no such upload.

        Raises:
            MissingPartError: a part is missing, or has another ETag.
            ConditionFailedError: the current version is not the expected one; the upload goes on.
        """
        with self._lock:
            upload = self.uploads.get(upload_id)
            if upload is None:
                return None
            chosen = []
            for number, etag in parts:
                part = upload.parts.get(number)
                if part is None or etag not in (None, part.etag):
                    raise MissingPartError(number)
                chosen.append(part)
            digest = hashlib.md5(b"".join(bytes.fromhex(part.etag) for part in chosen), usedforsecurity=False)
            etag = f"{digest.hexdigest()}-{len(chosen)}"
            data = b"".join(part.data for part in chosen)
            stored = self._store(upload.name, data, etag, metadata or upload.metadata, condition)
            del self.uploads[upload_id]
            return stored

    def abort(self, upload_id: str) -> bool:
        """End an upload and drop its parts; return whether it existed."""
        with self._lock:
            return self.uploads.pop(upload_id, None) is not None

    def _store(self, name: str, data: bytes, etag: str, metadata: Mapping[str, str], condition: Condition) -> Stored:
        self._check(name, condition)
        self._generation += 1
        now = datetime.datetime.now(datetime.UTC)
        self.content[name] = stored = Stored(data, etag, self._generation, now, metadata)
        return stored

    def _check(self, name: str, condition: Condition) -> None:
        current = self.content.get(name)
        if not condition.holds(current):
            raise ConditionFailedError(current)


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()
