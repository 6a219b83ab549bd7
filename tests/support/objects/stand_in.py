"""A stand-in for object stores: one map that speaks S3, GCS and Azure on loopback, records requests, injects faults.

`python -m tests.support.objects.stand_in --dialect s3 --port 0` prints the endpoint and serves until SIGTERM.
"""

from __future__ import annotations

import argparse
import http.server
import math
import signal
import threading
import urllib.parse
from types import TracebackType
from typing import Any, Self

from tests.support.objects.access import Access, Dialect, Reachable
from tests.support.objects.azure_dialect import AzureDialect
from tests.support.objects.calls import Answer, Call, DialectServer, RejectedError
from tests.support.objects.faults import Action, CutBody, Fail, Faults, LoseResponse, Refuse, Request, Stall
from tests.support.objects.loopback import LoopbackServer
from tests.support.objects.object_map import ObjectMap
from tests.support.objects.xml_dialects import GCS, S3, XmlDialect

PAGE_SIZE = 1000


class StandIn(Reachable):
    """An object server on a thread of its own, from `with` to its end.

    Attributes:
        objects: what is stored; tests may read and damage it.
        requests: in the order of their numbers; `clear` it to count from 1 again.
        faults: decides which requests fail; may be replaced at any time.
    """

    def __init__(
        self,
        dialect: Dialect = "s3",
        *,
        objects: ObjectMap | None = None,
        faults: Faults | None = None,
        page_size: int = PAGE_SIZE,
        port: int = 0,
    ) -> None:
        """Bind the port, so that the endpoint is known.

        Args:
            dialect: the protocol.
            objects: content to start with; None: an empty bucket named "bucket".
            faults: None: all requests are served.
            page_size: the largest page of a listing.
            port: 0: any free one.
        """
        self.objects = objects or ObjectMap()
        self.requests: list[Request] = []
        self.faults = faults
        self._dialect = _dialect_server(dialect, self.objects, page_size)
        self._recording = threading.Lock()
        self._ended = threading.Event()
        self._http = _HttpServer(self, port)
        self.access = Access(dialect, self._http.address + ("/account" if dialect == "azure" else ""))

    def __enter__(self) -> Self:
        self._http.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._http.stop()

    def respond(self, method: str, target: str, headers: dict[str, str], body: bytes) -> tuple[Answer, int] | None:
        """Serve one request: return the response and the length to cut its body to; None: close the connection."""
        path, _, query = target.partition("?")
        call = self._dialect.parse(
            method, path, dict(urllib.parse.parse_qsl(query, keep_blank_values=True)), headers, body
        )
        request = self._record(call)
        action = None if self.faults is None else self.faults.decide(request)
        if isinstance(action, Stall) and not self._wait(action):
            return None
        answer = self._answer(request, call, action)
        if answer is None or isinstance(action, LoseResponse):
            return None
        request.status = answer.status
        return answer, action.after_bytes if isinstance(action, CutBody) else len(answer.body)

    def _record(self, call: Call) -> Request:
        kind = self._dialect.kind(call)
        key = call.query.get("prefix", "") if kind in ("list", "list_uploads") else call.key
        span = call.headers.get("range") or call.headers.get("x-ms-range")
        with self._recording:
            request = Request(call.method, kind, key, span, number=len(self.requests) + 1)
            self.requests.append(request)
        return request

    def _wait(self, stall: Stall) -> bool:
        """Wait for the end of a stall; return whether the server is still there then."""
        return not self._ended.wait(None if math.isinf(stall.seconds) else stall.seconds)

    def _answer(self, request: Request, call: Call, action: Action | None) -> Answer | None:
        if isinstance(action, Refuse):
            return None
        if isinstance(action, Fail):
            failure = self._dialect.failure(action.status)
            again = {} if action.retry_after is None else {"Retry-After": f"{action.retry_after:g}"}
            return Answer(failure.status, failure.body, {**failure.headers, **again})
        try:
            return self._dialect.serve(request.kind, call)
        except RejectedError as error:
            return self._dialect.failure(error.status, error.code)
        except (KeyError, ValueError):  # a parameter is missing, or is no number
            return self._dialect.failure(400)


def _dialect_server(dialect: Dialect, objects: ObjectMap, page_size: int) -> DialectServer:
    if dialect == "azure":
        return AzureDialect(objects, page_size)
    return XmlDialect(objects, S3 if dialect == "s3" else GCS, page_size)


class _HttpServer(LoopbackServer):
    def __init__(self, stand_in: StandIn, port: int) -> None:
        self.stand_in = stand_in
        super().__init__(_Handler, port, "stand-in")


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _HttpServer

    def serve(self) -> None:
        body = self._read_body()
        if body is None:
            self.close_connection = True
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        served = self.server.stand_in.respond(self.command, self.path, headers, body)
        if served is None:
            self.close_connection = True
            return
        answer, length = served
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.status not in (204, 304):
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD" and answer.status not in (204, 304):
            self.wfile.write(answer.body[:length])
            self.close_connection = self.close_connection or length < len(answer.body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = serve  # noqa: N815  # names of http.server

    def _read_body(self) -> bytes | None:
        """Read the body of the request; return None if the client leaves before its end."""
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            return self._read_chunks()
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        return body if len(body) == length else None

    def _read_chunks(self) -> bytes | None:
        chunks: list[bytes] = []
        while True:
            head = self.rfile.readline()
            if not head:
                return None
            length = int(head.partition(b";")[0], 16)
            chunk = self.rfile.read(length + 2)
            if len(chunk) < length + 2:
                return None
            if length == 0:
                return b"".join(chunks)
            chunks.append(chunk[:length])

    def log_message(self, *arguments: Any) -> None: ...


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dialect", choices=["s3", "gcs", "azure"], default="s3")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # before threads inherit the mask
    with StandIn(options.dialect, port=options.port) as server:
        print(server.endpoint, flush=True)
        signal.sigwait(signals)


if __name__ == "__main__":
    main()
