"""Loopback: where the processes of a job on one machine meet."""

from __future__ import annotations

import socket


def free_address() -> str:
    """An address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
