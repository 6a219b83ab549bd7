"""Local servers that imitate the metadata servers of clouds, and servers that misbehave."""

from __future__ import annotations

import contextlib
import http.server
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

LIMIT_S = 60.0
Handler = http.server.BaseHTTPRequestHandler
Respond = Callable[["Handler", "Server"], None]


class Server:
    """Records each request as "GET /path", and lets `respond` answer it.

    Attributes:
        respond: answers requests; may be replaced at any time.
        requests: in their order.
        over: set when the server ends; hanging answers wait for it.
    """

    def __init__(self, respond: Respond) -> None:
        self.respond = respond
        self.requests: queue.Queue[str] = queue.Queue()
        self.over = threading.Event()
        server = self

        class Handling(http.server.BaseHTTPRequestHandler):
            def handle_request(self) -> None:
                server.requests.put(f"{self.command} {self.path}")
                with contextlib.suppress(OSError):  # the client has disconnected
                    server.respond(self, server)

            do_GET = do_PUT = handle_request  # noqa: N815  # names of http.server

            def log_message(self, *arguments: Any) -> None: ...

        class Quiet(http.server.ThreadingHTTPServer):
            def handle_error(self, *arguments: Any) -> None: ...  # of disconnected clients

        self._http = Quiet(("127.0.0.1", 0), Handling)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def wait_for(self, count: int) -> list[str]:
        """Wait for `count` more requests, and return them."""
        return [self.requests.get(timeout=LIMIT_S) for _ in range(count)]

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def send(handler: Handler, status: int, body: bytes, **headers: str) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


class Gce:
    """Google's metadata server of a machine. It refuses requests without its header."""

    def __init__(self) -> None:
        self.values = {"preempted": "FALSE", "maintenance-event": "NONE"}

    def __call__(self, handler: Handler, server: Server) -> None:
        folder, _, key = handler.path.rpartition("/")
        if handler.headers.get("Metadata-Flavor") != "Google" or handler.headers.get("X-Forwarded-For"):
            handler.send_error(403)
        elif folder != "/computeMetadata/v1/instance" or key not in self.values:
            send(handler, 404, b"<html>", Metadata_Flavor="Google")
        else:
            send(handler, 200, self.values[key].encode(), Metadata_Flavor="Google", Content_Type="application/text")


class Imds:
    """Amazon's metadata service of an instance, for clients with a valid token.

    Attributes:
        answers: bodies by their path; all other paths are not found.
        tokens: the valid tokens.
        given: the number of tokens given so far.
        date: the date of the answers; None: the current one.
    """

    ACTION = "/latest/meta-data/spot/instance-action"
    REBALANCE = "/latest/meta-data/events/recommendations/rebalance"

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}
        self.tokens: set[str] = set()
        self.given = 0
        self.date: str | None = None

    def interrupt(self, action: str, at: str) -> None:
        self.answers[self.ACTION] = json.dumps({"action": action, "time": at}).encode()

    def __call__(self, handler: Handler, server: Server) -> None:
        if self.date is not None:
            handler.date_time_string = lambda *_: self.date  # type: ignore[method-assign,assignment,return-value]
        if handler.command == "PUT" and handler.path == "/latest/api/token":
            seconds = handler.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            if not seconds.isdecimal() or not 1 <= int(seconds) <= 21600:
                send(handler, 400, b"")
                return
            self.given += 1
            token = f"AQAEAD_{self.given}=="
            self.tokens.add(token)
            send(handler, 200, token.encode(), X_aws_ec2_metadata_token_ttl_seconds=seconds)
        elif handler.headers.get("X-aws-ec2-metadata-token") not in self.tokens:
            send(handler, 401, b"")
        elif handler.command == "GET" and handler.path in self.answers:
            send(handler, 200, self.answers[handler.path], Content_Type="application/json")
        else:
            send(handler, 404, b"<html>Not Found</html>")


# Misbehaviour of servers.


def hang(handler: Handler, server: Server) -> None:
    server.over.wait()


def close(handler: Handler, server: Server) -> None:
    handler.connection.close()


def break_off(handler: Handler, server: Server) -> None:
    """Send an incomplete body: the rest of a value may look like another value."""
    handler.wfile.write(b"HTTP/1.0 200 OK\r\nMetadata-Flavor: Google\r\nContent-Length: 30\r\n\r\nTERMINATE_ON_HOST")


def fail(handler: Handler, server: Server) -> None:
    send(handler, 503, b"TRUE", Metadata_Flavor="Google")


def garbage(handler: Handler, server: Server) -> None:
    send(handler, 200, bytes(range(256)), Metadata_Flavor="Google")


def no_http(handler: Handler, server: Server) -> None:
    handler.wfile.write(b"SSH-2.0-OpenSSH_9.9\r\n" * 100)


def endless(handler: Handler, server: Server) -> None:
    handler.wfile.write(b"HTTP/1.0 200 OK\r\nMetadata-Flavor: Google\r\n\r\n")
    while not server.over.is_set():
        handler.wfile.write(b"TRUE" * 20_000)


MISBEHAVIOURS = (hang, close, break_off, fail, garbage, no_http, endless)


def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds, which another thread makes true."""
    end, tick = time.monotonic() + LIMIT_S, threading.Event()
    while not condition():
        assert time.monotonic() < end, "the condition never held"
        tick.wait(0.002)


@contextlib.contextmanager
def started(source: Any) -> Iterator[Any]:
    """Start a source, and stop it afterwards."""
    source.start()
    try:
        yield source
    finally:
        source.stop()


def notice_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "jaxckpt-notice"]
