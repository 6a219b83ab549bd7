"""HTTP requests as dialects see them, and what the dialects have in common: ranges, conditions of reads, metadata."""

from __future__ import annotations

import dataclasses
import datetime
import email.utils
import re
from collections.abc import Mapping
from typing import Protocol

from tests.support.objects.faults import Kind
from tests.support.objects.object_map import Stored

_METADATA = {"cache-control", "content-disposition", "content-encoding", "content-language", "content-type"}


@dataclasses.dataclass(frozen=True)
class Call:
    """A parsed request; names of headers are in lower case."""

    method: str
    bucket: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    @property
    def name(self) -> str:
        """The key of the object map: "bucket/key"."""
        return f"{self.bucket}/{self.key}"


@dataclasses.dataclass(frozen=True)
class Answer:
    """A response.

    Attributes:
        status: the HTTP status.
        body: left out if the request was HEAD.
        headers: all but Content-Length.
    """

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


class RejectedError(Exception):
    """A request cannot be served.

    Attributes:
        status: the HTTP status.
        code: the error code of the dialect, such as "NoSuchKey".
    """

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status = status
        self.code = code


class DialectServer(Protocol):
    """Serves the requests of one protocol out of an object map."""

    def parse(self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes) -> Call:
        """Find bucket and key in a request's path, and decode its body."""

    def kind(self, call: Call) -> Kind:
        """Return what the request asks for."""

    def serve(self, kind: Kind, call: Call) -> Answer:
        """Have the effect of a request, and return its response."""

    def failure(self, status: int, code: str | None = None) -> Answer:
        """Return the response for an error."""


def read(call: Call, stored: Stored, etag: str, metadata_prefix: str, extra: Mapping[str, str]) -> Answer:
    """Answer a GET or HEAD request for an object.

    Args:
        call: the request.
        stored: the object.
        etag: its ETag in this dialect, with quotes.
        metadata_prefix: that of the headers with the metadata of users.
        extra: more headers of the response.
    """
    headers = {
        "ETag": etag,
        "Last-Modified": http_date(stored.modified),
        "Accept-Ranges": "bytes",
        "Content-Type": "application/octet-stream",
        **{_header_name(name, metadata_prefix): value for name, value in stored.metadata.items()},
        **extra,
    }
    _check_conditions_of_read(call, stored, etag)
    if _is_unchanged(call, stored, etag):
        return Answer(304, headers={"ETag": etag, "Last-Modified": http_date(stored.modified)})
    span = parse_range(call.headers.get("range") or call.headers.get("x-ms-range"), len(stored.data))
    if span is None:
        return Answer(200, stored.data, headers)
    start, stop = span
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(stored.data)}"
    return Answer(206, stored.data[start:stop], headers)


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Return start and stop of a Range header; None: the whole object.

    Raises:
        RejectedError: no byte of the object is in the range.
    """
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header or "")
    if match is None or match[0] == "bytes=-":
        return None
    first, last = match[1], match[2]
    if not first:
        start, stop = max(size - int(last), 0), size
    else:
        start, stop = int(first), min(int(last) + 1, size) if last else size
        if last and int(last) < start:
            return None
    if start >= stop:
        raise RejectedError(416, "InvalidRange")
    return start, stop


def http_date(moment: datetime.datetime) -> str:
    """Return a time as headers have it."""
    return email.utils.format_datetime(moment, usegmt=True)


def chosen_metadata(headers: Mapping[str, str], prefix: str, standard_prefix: str = "") -> dict[str, str]:
    """Return the headers of a write that reads shall show; those of users with the prefix "meta-"."""
    standard = {name: headers[standard_prefix + name] for name in _METADATA if standard_prefix + name in headers}
    users = {f"meta-{name[len(prefix) :]}": value for name, value in headers.items() if name.startswith(prefix)}
    return standard | users


def etags(header: str) -> list[str]:
    """Return the ETags of a header without quotes."""
    return [each.strip().removeprefix("W/").strip('"') for each in header.split(",")]


def _header_name(name: str, metadata_prefix: str) -> str:
    return metadata_prefix + name.removeprefix("meta-") if name.startswith("meta-") else name.title()


def _check_conditions_of_read(call: Call, stored: Stored, etag: str) -> None:
    wanted = call.headers.get("if-match")
    if wanted is not None:
        if wanted.strip() != "*" and etag.strip('"') not in etags(wanted):
            raise RejectedError(412, "PreconditionFailed")
        return
    limit = _moment(call.headers.get("if-unmodified-since"))
    if limit is not None and stored.modified.replace(microsecond=0) > limit:
        raise RejectedError(412, "PreconditionFailed")


def _is_unchanged(call: Call, stored: Stored, etag: str) -> bool:
    known = call.headers.get("if-none-match")
    if known is not None:
        return known.strip() == "*" or etag.strip('"') in etags(known)
    since = _moment(call.headers.get("if-modified-since"))
    return since is not None and stored.modified.replace(microsecond=0) <= since


def _moment(header: str | None) -> datetime.datetime | None:
    return None if header is None else email.utils.parsedate_to_datetime(header)
