"""Azure Blob Storage, as far as obstore speaks it."""

from __future__ import annotations

import base64
import re
import urllib.parse
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from xml.sax.saxutils import escape

from tests.support.objects.calls import Answer, Call, RejectedError, chosen_metadata, etags, http_date, read
from tests.support.objects.faults import Kind
from tests.support.objects.object_map import Condition, ConditionFailedError, MissingPartError, ObjectMap, Stored

_HEAD = '<?xml version="1.0" encoding="utf-8"?>'
_BATCH_LIMIT = 256
_CODES = {
    400: "InvalidInput", 403: "AuthorizationFailure", 404: "BlobNotFound", 409: "BlobAlreadyExists",
    412: "ConditionNotMet", 416: "InvalidRange", 429: "TooManyRequests", 500: "InternalError",
    501: "NotImplemented", 503: "ServerBusy",
}  # fmt: skip


class AzureDialect:
    """Serves Azure Blob Storage with the account as the first part of each path.

    An ETag is new with each write, even of equal content.
    """

    def __init__(self, objects: ObjectMap, page_size: int) -> None:
        self._objects = objects
        self._page_size = page_size

    def parse(self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes) -> Call:
        container, key = _container_and_key(path)
        return Call(method, container, key, query, headers, body)

    def kind(self, call: Call) -> Kind:
        query, headers = call.query, call.headers
        match call.method, bool(call.key):
            case "GET", False if query.get("comp") == "list":
                return "list"
            case "POST", False if query.get("comp") == "batch":
                return "delete_many"
            case "GET", True:
                return "get"
            case "HEAD", True:
                return "head"
            case "DELETE", True:
                return "delete"
            case "PUT", True if query.get("comp") == "block":
                return "part"
            case "PUT", True if query.get("comp") == "blocklist":
                return "complete"
            case "PUT", True if "x-ms-copy-source" in headers:
                return "copy"
            case "PUT", True if "comp" not in query:
                return "put_create" if "if-none-match" in headers else "put_update" if "if-match" in headers else "put"
        return "other"

    def serve(self, kind: Kind, call: Call) -> Answer:
        if kind != "other" and call.bucket not in self._objects.buckets:
            raise RejectedError(404, "ContainerNotFound")
        match kind:
            case "get" | "head":
                stored = self._objects.get(call.name)
                if stored is None:
                    raise RejectedError(404, "BlobNotFound")
                return read(call, stored, _etag(stored), "x-ms-meta-", {"x-ms-blob-type": "BlockBlob"})
            case "put" | "put_create" | "put_update" | "copy" | "delete" | "complete":
                try:
                    return self._write(kind, call)
                except ConditionFailedError:
                    create = "if-none-match" in call.headers
                    raise (
                        RejectedError(409, "BlobAlreadyExists") if create else RejectedError(412, "ConditionNotMet")
                    ) from None
            case "part":
                self._objects.stage_block(call.name, call.query["blockid"], call.body)
                return Answer(201)
            case "list":
                return self._list(call)
            case "delete_many":
                return self._delete_many(call)
        return self._container(call)

    def failure(self, status: int, code: str | None = None) -> Answer:
        code = code or _CODES.get(status, "InternalError")
        body = f"{_HEAD}<Error><Code>{code}</Code><Message>{code}</Message></Error>"
        return Answer(status, body.encode(), {"Content-Type": "application/xml", "x-ms-error-code": code})

    def _write(self, kind: Kind, call: Call) -> Answer:
        condition = _condition(call)
        metadata = chosen_metadata(call.headers, "x-ms-meta-", "x-ms-blob-")
        if kind == "delete":
            if not self._objects.delete(call.name, condition):
                raise RejectedError(404, "BlobNotFound")
            return Answer(202)
        if kind == "copy":
            source = "/".join(_container_and_key(urllib.parse.urlsplit(call.headers["x-ms-copy-source"]).path))
            copied = self._objects.copy_object(source, call.name, condition)
            if copied is None:
                raise RejectedError(404, "BlobNotFound")
            return Answer(202, headers={**_written(copied), "x-ms-copy-status": "success"})
        if kind != "complete":
            return Answer(201, headers=_written(self._objects.put_at_once(call.name, call.body, metadata, condition)))
        blocks: list[tuple[str, str | None]] = [(each.text or "", None) for each in ElementTree.fromstring(call.body)]
        if not blocks:
            return Answer(201, headers=_written(self._objects.put_at_once(call.name, b"", metadata, condition)))
        try:
            stored = self._objects.complete(call.name, blocks, metadata, condition)
        except MissingPartError:
            stored = None
        if stored is None:
            raise RejectedError(400, "InvalidBlockList")
        return Answer(201, headers=_written(stored))

    def _list(self, call: Call) -> Answer:
        query = call.query
        marker = query.get("marker")
        after = base64.urlsafe_b64decode(marker).decode() if marker else ""
        limit = min(int(query.get("maxresults", self._page_size)), self._page_size)
        prefix, delimiter, first = (query.get(name, "") for name in ("prefix", "delimiter", "startFrom"))
        page = self._objects.list(call.bucket, prefix, delimiter, after, limit, first)
        blobs = [
            f"<Blob><Name>{escape(key)}</Name><Properties><Last-Modified>{http_date(stored.modified)}</Last-Modified>"
            f"<Etag>{_etag(stored).strip(chr(34))}</Etag><Content-Length>{len(stored.data)}</Content-Length>"
            f"<Content-Type>application/octet-stream</Content-Type></Properties></Blob>"
            for key, stored in page.objects
        ]
        prefixes = [f"<BlobPrefix><Name>{escape(each)}</Name></BlobPrefix>" for each in page.prefixes]
        following = "" if page.after is None else base64.urlsafe_b64encode(page.after.encode()).decode()
        body = (
            f"{_HEAD}<EnumerationResults><Prefix>{escape(prefix)}</Prefix>"
            f"<Blobs>{''.join(blobs)}{''.join(prefixes)}</Blobs><NextMarker>{following}</NextMarker>"
            "</EnumerationResults>"
        )
        return Answer(200, body.encode(), {"Content-Type": "application/xml"})

    def _delete_many(self, call: Call) -> Answer:
        paths = re.findall(rb"(?m)^DELETE (\S+) HTTP/1\.1\r$", call.body)
        if not 0 < len(paths) <= _BATCH_LIMIT:
            raise RejectedError(400, "ExceedsMaxBatchRequestCount")
        boundary = "batchresponse"
        parts = []
        for number, path in enumerate(paths):
            container, key = _container_and_key(path.decode())
            existed = self._objects.delete(f"{container}/{key}")
            status = "202 Accepted" if existed else "404 The specified blob does not exist."
            code = "" if existed else "x-ms-error-code: BlobNotFound\r\n"
            parts.append(
                f"--{boundary}\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\n"
                f"HTTP/1.1 {status}\r\n{code}x-ms-version: 2023-11-03\r\n\r\n"
            )
        body = "".join(parts) + f"--{boundary}--\r\n"
        return Answer(202, body.encode(), {"Content-Type": f"multipart/mixed; boundary={boundary}"})

    def _container(self, call: Call) -> Answer:
        if call.method == "PUT" and call.query.get("restype") == "container" and not call.key:
            self._objects.buckets.add(call.bucket)
            return Answer(201)
        raise RejectedError(501, "NotImplemented")


def _container_and_key(path: str) -> tuple[str, str]:
    _, _, rest = path.removeprefix("/").partition("/")  # the first part is the account
    container, _, key = rest.partition("/")
    return urllib.parse.unquote(container), urllib.parse.unquote(key)


def _etag(stored: Stored) -> str:
    return f'"0x{stored.generation:016X}"'


def _written(stored: Stored) -> dict[str, str]:
    return {"ETag": _etag(stored), "Last-Modified": http_date(stored.modified)}


def _condition(call: Call) -> Condition:
    if "if-none-match" in call.headers:
        if call.headers["if-none-match"].strip() != "*":
            raise RejectedError(501, "NotImplemented")
        return Condition(absent=True)
    if "if-match" in call.headers:
        wanted = etags(call.headers["if-match"])[0]
        # An ETag of another form matches no generation.
        return Condition(generation=int(wanted, 16) if re.fullmatch(r"0x[0-9A-F]{16}", wanted) else -1)
    return Condition()
