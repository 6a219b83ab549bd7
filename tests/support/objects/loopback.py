"""A threaded TCP server on loopback that ends at once, whatever its connections wait for."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import sys
import threading
from typing import Any


class LoopbackServer(socketserver.ThreadingTCPServer):
    """Serves each connection on a thread of its own, from `start` to `stop`."""

    allow_reuse_address = True
    daemon_threads = False  # `server_close` joins the threads of connections
    request_queue_size = 128

    def __init__(self, handler: type[socketserver.BaseRequestHandler], port: int, name: str) -> None:
        """Bind the port; 0: any free one."""
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(("127.0.0.1", port), handler)
        # A short interval makes `shutdown` return soon.
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), name=name)

    @property
    def address(self) -> str:
        """The URL of the server."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def start(self) -> None:
        """Accept connections."""
        self._thread.start()

    def stop(self) -> None:
        """Close all connections, and wait for their threads."""
        self.shutdown()
        self._thread.join()
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):  # the other side has closed it
                    each.shutdown(socket.SHUT_RDWR)
        self.server_close()

    def track(self, connection: socket.socket) -> None:
        """Close this connection at the end, too."""
        with self._lock:
            self._sockets.add(connection)

    def untrack(self, connection: socket.socket) -> None:
        """Leave a connection that is closed already."""
        with self._lock:
            self._sockets.discard(connection)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.track(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.untrack(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep quiet about clients that disconnect; let other errors be seen."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)
