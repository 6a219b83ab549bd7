"""S3, and the XML interface of GCS, which differs in its conditions, versions and deletions."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import urllib.parse
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from xml.sax.saxutils import escape

from tests.support.objects.calls import Answer, Call, RejectedError, chosen_metadata, etags, read
from tests.support.objects.faults import Kind
from tests.support.objects.object_map import Condition, ConditionFailedError, MissingPartError, ObjectMap, Stored

_HEAD = '<?xml version="1.0" encoding="UTF-8"?>\n'
_SPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
_CODES = {
    400: "InvalidRequest", 403: "AccessDenied", 404: "NoSuchKey", 409: "ConditionalRequestConflict",
    412: "PreconditionFailed", 416: "InvalidRange", 429: "TooManyRequests", 500: "InternalError",
    501: "NotImplemented", 503: "SlowDown",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Flavour:
    """What S3 and GCS do differently.

    Attributes:
        prefix: that of their own headers.
        generations: writes are conditional on generations, and responses name them; else on ETags.
        missing_deletes: deleting what does not exist is an error.
        bulk_delete: one request can delete many keys.
    """

    prefix: str
    generations: bool
    missing_deletes: bool
    bulk_delete: bool


S3 = Flavour("x-amz-", generations=False, missing_deletes=False, bulk_delete=True)
GCS = Flavour("x-goog-", generations=True, missing_deletes=True, bulk_delete=False)


class XmlDialect:
    """Serves S3 (path style) or the XML interface of GCS.

    Completing an upload twice answers 404 the second time, as if the store had forgotten the upload at once.
    """

    def __init__(self, objects: ObjectMap, flavour: Flavour, page_size: int) -> None:
        self._objects = objects
        self._flavour = flavour
        self._page_size = page_size

    def parse(self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes) -> Call:
        bucket, _, key = path.removeprefix("/").partition("/")
        if headers.get("x-amz-content-sha256", "").startswith("STREAMING-"):
            body = _without_chunk_signatures(body)
        return Call(method, urllib.parse.unquote(bucket), urllib.parse.unquote(key), query, headers, body)

    def kind(self, call: Call) -> Kind:
        query, headers = call.query, call.headers
        match call.method, bool(call.key):
            case "GET", False:
                return "list_uploads" if "uploads" in query else "list"
            case "POST", False if "delete" in query:
                return "delete_many"
            case "GET", True:
                return "get"
            case "HEAD", True:
                return "head"
            case "PUT", True if "partNumber" in query:
                return "part"
            case "PUT", True if f"{self._flavour.prefix}copy-source" in headers:
                return "copy"
            case "PUT", True:
                return self._kind_of_put(headers)
            case "POST", True if "uploads" in query:
                return "create_upload"
            case "POST", True if "uploadId" in query:
                return "complete"
            case "DELETE", True:
                return "abort" if "uploadId" in query else "delete"
        return "other"

    def serve(self, kind: Kind, call: Call) -> Answer:
        if kind != "other" and call.bucket not in self._objects.buckets:
            raise RejectedError(404, "NoSuchBucket")
        match kind:
            case "get" | "head":
                return self._read(call)
            case "put" | "put_create" | "put_update":
                return self._put(call)
            case "copy":
                return self._copy(call)
            case "list":
                return self._list(call)
            case "delete":
                return self._delete(call)
            case "delete_many" if self._flavour.bulk_delete:
                return self._delete_many(call)
            case "create_upload":
                upload_id = self._objects.create_upload(call.name, self._metadata(call))
                return _xml("InitiateMultipartUploadResult", _tag("UploadId", upload_id))
            case "part":
                return self._part(call)
            case "complete":
                return self._complete(call)
            case "abort":
                if not self._objects.abort(call.query["uploadId"]):
                    raise RejectedError(404, "NoSuchUpload")
                return Answer(204)
            case "list_uploads":
                return self._list_uploads(call)
        return self._bucket(call)

    def failure(self, status: int, code: str | None = None) -> Answer:
        code = code or _CODES.get(status, "InternalError")
        if status == 304:
            return Answer(304)
        body = f"{_HEAD}<Error>{_tag('Code', code)}{_tag('Message', code)}</Error>"
        return Answer(status, body.encode(), {"Content-Type": "application/xml"})

    def _kind_of_put(self, headers: Mapping[str, str]) -> Kind:
        if self._flavour.generations:
            wanted = headers.get("x-goog-if-generation-match")
            return "put" if wanted is None else "put_create" if int(wanted) == 0 else "put_update"
        return "put_create" if "if-none-match" in headers else "put_update" if "if-match" in headers else "put"

    def _condition(self, call: Call) -> Condition:
        if self._flavour.generations:
            wanted = call.headers.get("x-goog-if-generation-match")
            if wanted is None:
                return Condition()
            return Condition(absent=True) if int(wanted) == 0 else Condition(generation=int(wanted))
        if "if-none-match" in call.headers:
            if call.headers["if-none-match"].strip() != "*":
                raise RejectedError(501, "NotImplemented")
            return Condition(absent=True)
        if "if-match" in call.headers:
            return Condition(etag=etags(call.headers["if-match"])[0])
        return Condition()

    def _condition_failed(self, call: Call, error: ConditionFailedError) -> RejectedError:
        missing = error.current is None and "if-match" in call.headers and not self._flavour.generations
        return RejectedError(404, "NoSuchKey") if missing else RejectedError(412, "PreconditionFailed")

    def _metadata(self, call: Call) -> dict[str, str]:
        return chosen_metadata(call.headers, f"{self._flavour.prefix}meta-")

    def _version(self, stored: Stored) -> dict[str, str]:
        return {"x-goog-generation": str(stored.generation)} if self._flavour.generations else {}

    def _read(self, call: Call) -> Answer:
        stored = self._objects.get(call.name)
        generation = call.query.get("generation")
        if stored is None or (generation is not None and int(generation) != stored.generation):
            raise RejectedError(404, "NoSuchKey")
        return read(call, stored, _quoted(stored.etag), f"{self._flavour.prefix}meta-", self._version(stored))

    def _put(self, call: Call) -> Answer:
        try:
            stored = self._objects.put(call.name, call.body, self._metadata(call), self._condition(call))
        except ConditionFailedError as error:
            raise self._condition_failed(call, error) from None
        return Answer(200, headers={"ETag": _quoted(stored.etag), **self._version(stored)})

    def _copy(self, call: Call) -> Answer:
        source = urllib.parse.unquote(call.headers[f"{self._flavour.prefix}copy-source"]).removeprefix("/")
        try:
            stored = self._objects.copy_object(source, call.name, self._condition(call))
        except ConditionFailedError as error:
            raise self._condition_failed(call, error) from None
        if stored is None:
            raise RejectedError(404, "NoSuchKey")
        return _xml("CopyObjectResult", _tag("ETag", _quoted(stored.etag)), _tag("LastModified", _iso(stored)))

    def _delete(self, call: Call) -> Answer:
        try:
            existed = self._objects.delete(call.name, self._condition(call))
        except ConditionFailedError as error:
            raise self._condition_failed(call, error) from None
        if not existed and self._flavour.missing_deletes:
            raise RejectedError(404, "NoSuchKey")
        return Answer(204)

    def _delete_many(self, call: Call) -> Answer:
        keys = [each.text or "" for each in _parse(call.body).iterfind(".//{*}Key")]
        if len(keys) > 1000:
            raise RejectedError(400, "MalformedXML")
        for key in keys:
            self._objects.delete(f"{call.bucket}/{key}")
        return _xml("DeleteResult", *(f"<Deleted>{_tag('Key', key)}</Deleted>" for key in keys))

    def _part(self, call: Call) -> Answer:
        if f"{self._flavour.prefix}copy-source" in call.headers:
            raise RejectedError(501, "NotImplemented")
        part = self._objects.put_part(call.query["uploadId"], call.query["partNumber"], call.body)
        if part is None:
            raise RejectedError(404, "NoSuchUpload")
        return Answer(200, headers={"ETag": _quoted(part.etag)})

    def _complete(self, call: Call) -> Answer:
        parts = [
            (each.findtext("{*}PartNumber", ""), (each.findtext("{*}ETag") or "").strip('"') or None)
            for each in _parse(call.body).iterfind("{*}Part")
        ]
        numbers = [int(number) for number, _ in parts]
        if not parts or numbers != sorted(set(numbers)):
            raise RejectedError(400, "InvalidPartOrder")
        try:
            stored = self._objects.complete(call.query["uploadId"], parts, condition=self._condition(call))
        except MissingPartError:
            raise RejectedError(400, "InvalidPart") from None
        except ConditionFailedError as error:
            raise self._condition_failed(call, error) from None
        if stored is None:
            raise RejectedError(404, "NoSuchUpload")
        answer = _xml("CompleteMultipartUploadResult", _tag("Key", call.key), _tag("ETag", _quoted(stored.etag)))
        return dataclasses.replace(answer, headers={**answer.headers, **self._version(stored)})

    def _list(self, call: Call) -> Answer:
        query = call.query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        token = query.get("continuation-token")
        after = query.get("start-after", "") if token is None else _from_token(token)
        limit = min(int(query.get("max-keys", self._page_size)), self._page_size)
        page = self._objects.list(call.bucket, prefix, delimiter, after, limit)
        encode = urllib.parse.quote if query.get("encoding-type") == "url" else str
        content = [
            f"<Contents>{_tag('Key', encode(key))}{_tag('LastModified', _iso(stored))}"
            f"{_tag('ETag', _quoted(stored.etag))}{_tag('Size', str(len(stored.data)))}</Contents>"
            for key, stored in page.objects
        ]
        common = [f"<CommonPrefixes>{_tag('Prefix', encode(each))}</CommonPrefixes>" for each in page.prefixes]
        more = [] if page.after is None else [_tag("NextContinuationToken", _to_token(page.after))]
        return _xml(
            "ListBucketResult",
            _tag("Name", call.bucket),
            _tag("Prefix", encode(prefix)),
            _tag("KeyCount", str(len(content) + len(common))),
            _tag("MaxKeys", str(limit)),
            _tag("IsTruncated", str(bool(more)).lower()),
            *([_tag("EncodingType", "url")] if "encoding-type" in query else []),
            *more,
            *content,
            *common,
        )

    def _list_uploads(self, call: Call) -> Answer:
        start = f"{call.bucket}/"
        found = sorted(
            (upload.name[len(start) :], upload_id)
            for upload_id, upload in self._objects.copy().uploads.items()
            if upload.name.startswith(start + call.query.get("prefix", ""))
        )
        uploads = [f"<Upload>{_tag('Key', key)}{_tag('UploadId', upload_id)}</Upload>" for key, upload_id in found]
        return _xml("ListMultipartUploadsResult", _tag("IsTruncated", "false"), *uploads)

    def _bucket(self, call: Call) -> Answer:
        if call.method == "PUT" and call.bucket and not call.key:
            self._objects.buckets.add(call.bucket)
            return Answer(200)
        if call.method == "HEAD" and not call.key:
            if call.bucket not in self._objects.buckets:
                raise RejectedError(404, "NoSuchBucket")
            return Answer(200)
        raise RejectedError(501, "NotImplemented")


def _quoted(etag: str) -> str:
    return f'"{etag}"'


def _tag(name: str, text: str) -> str:
    return f"<{name}>{escape(text)}</{name}>"


def _xml(root: str, *content: str) -> Answer:
    body = f"{_HEAD}<{root} {_SPACE}>{''.join(content)}</{root}>"
    return Answer(200, body.encode(), {"Content-Type": "application/xml"})


def _parse(body: bytes) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(body)
    except ElementTree.ParseError:
        raise RejectedError(400, "MalformedXML") from None


def _iso(stored: Stored) -> str:
    return stored.modified.strftime("%Y-%m-%dT%H:%M:%S.") + f"{stored.modified.microsecond // 1000:03}Z"


def _to_token(after: str) -> str:
    return base64.urlsafe_b64encode(after.encode()).decode()


def _from_token(token: str) -> str:
    try:
        return base64.urlsafe_b64decode(token).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise RejectedError(400, "InvalidArgument") from None


def _without_chunk_signatures(body: bytes) -> bytes:
    """Decode `aws-chunked`: each chunk has its length in hexadecimal and its signature in front."""
    data = []
    while body:
        head, _, body = body.partition(b"\r\n")
        length = int(head.partition(b";")[0], 16)
        if length == 0:
            break
        data.append(body[:length])
        body = body[length + 2 :]
    return b"".join(data)
