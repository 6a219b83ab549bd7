"""The proxy before object servers: what it passes on, and its faults."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import os
import socket
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

import obstore
import pytest
from obstore.exceptions import GenericError

from tests.support.objects.proxy import Bandwidth, Proxy
from tests.support.objects.stand_in import StandIn

NO_RETRY: Any = {"max_retries": 0}


@pytest.fixture
def server() -> Iterator[StandIn]:
    with StandIn() as server:
        yield server


@pytest.fixture
def proxy(server: StandIn) -> Iterator[Proxy]:
    with Proxy(server.endpoint, seed=1) as proxy:
        yield proxy


@pytest.fixture
def store(server: StandIn, proxy: Proxy) -> Any:
    return server.access.through(proxy.endpoint).store(retry_config=NO_RETRY)


@pytest.fixture
def impatient_store(server: StandIn, proxy: Proxy) -> Any:
    client_options: Any = {"timeout": "200ms"}
    return server.access.through(proxy.endpoint).store(retry_config=NO_RETRY, client_options=client_options)


@contextlib.contextmanager
def raw_connection(proxy: Proxy) -> Iterator[http.client.HTTPConnection]:
    address = urllib.parse.urlsplit(proxy.endpoint).netloc
    with contextlib.closing(http.client.HTTPConnection(address, timeout=30)) as connection:
        yield connection


def test_passes_bodies_both_ways(proxy: Proxy, store: Any) -> None:
    data = os.urandom(300_000)
    obstore.put(store, "a", data)
    assert bytes(obstore.get(store, "a").bytes()) == data
    assert obstore.head(store, "a")["size"] == len(data)
    assert proxy.counters.requests == 3
    assert proxy.counters.sent_bytes == len(data)
    assert proxy.counters.received_bytes > len(data)


@pytest.mark.parametrize("dialect", ["gcs", "azure"])
def test_passes_other_dialects(dialect: Any) -> None:
    with StandIn(dialect) as server, Proxy(server.endpoint) as proxy:
        store = server.access.through(proxy.endpoint).store()
        obstore.put(store, "a", b"1", mode="create")
        obstore.delete(store, ["a"])
        assert [request.status for request in server.requests] in ([200, 204], [201, 202])


def test_keeps_connections_and_decodes_no_chunks(server: StandIn, proxy: Proxy) -> None:
    with raw_connection(proxy) as connection:
        for _ in range(3):
            connection.request("PUT", "/bucket/a", iter([b"12", b"345"]), encode_chunked=True)
            response = connection.getresponse()
            response.read()
            assert not response.will_close
    assert server.objects.content["bucket/a"].data == b"12345"


def test_answers_expectation_before_body(server: StandIn, proxy: Proxy) -> None:
    with socket.create_connection(("127.0.0.1", urllib.parse.urlsplit(proxy.endpoint).port or 0), 30) as connection:
        connection.sendall(b"PUT /bucket/a HTTP/1.1\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"ab")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    assert server.objects.content["bucket/a"].data == b"ab"


def test_latency_delays_each_request(proxy: Proxy, store: Any) -> None:
    proxy.latency_s = 0.05
    start = time.monotonic()
    for _ in range(2):
        obstore.put(store, "a", b"1")
    assert time.monotonic() - start >= 0.1


def test_bandwidth_books_transfers_in_a_row() -> None:
    bandwidth = Bandwidth(1000, burst_s=0.1)
    assert [round(bandwidth.book(100, now=5.0), 6) for _ in range(3)] == [0.0, 0.1, 0.2]
    assert round(bandwidth.book(100, now=5.1), 6) == 0.2
    assert bandwidth.book(100, now=9.0) == 0.0


def test_many_connections_share_bandwidth(server: StandIn, proxy: Proxy, store: Any) -> None:
    server.objects.put("bucket/a", bytes(50_000))
    proxy.bandwidth.bytes_per_s = 2_000_000
    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        sizes = list(pool.map(lambda _: len(obstore.get(store, "a").bytes()), range(8)))
    assert sum(sizes) == 400_000
    assert time.monotonic() - start >= 0.17


def test_share_of_requests_fails_without_effect(server: StandIn, proxy: Proxy, store: Any) -> None:
    proxy.fail = 0.5

    def put(number: int) -> str:
        try:
            obstore.put(store, f"{number}", bytes(1000))
        except GenericError as error:
            return str(error)
        return ""

    errors = [error for error in map(put, range(20)) if error]
    failed = len(errors)
    assert all("503" in error for error in errors)
    assert 0 < failed < 20
    assert proxy.counters.failed == failed
    assert len(server.requests) == len(server.objects.content) == 20 - failed


def test_cut_request_has_no_effect(server: StandIn, proxy: Proxy, store: Any) -> None:
    proxy.cut_request = 1.0
    with pytest.raises(GenericError):
        obstore.put(store, "a", bytes(100_000))
    assert proxy.counters.requests_cut == 1
    assert not server.objects.content


def test_cut_response_is_an_error(server: StandIn, proxy: Proxy, store: Any) -> None:
    server.objects.put("bucket/a", bytes(100_000))
    proxy.cut_response = 1.0
    with pytest.raises(GenericError):
        obstore.get(store, "a").bytes()
    assert proxy.counters.responses_cut == 1


@pytest.mark.parametrize("after_bytes", [0, 50_000])
def test_one_upload_stalls(server: StandIn, proxy: Proxy, store: Any, impatient_store: Any, after_bytes: int) -> None:
    proxy.stall_next(after_bytes)
    with pytest.raises(GenericError, match="Timeout"):
        obstore.put(impatient_store, "a", bytes(100_000))
    obstore.put(store, "b", b"1")
    assert list(server.objects.content) == ["bucket/b"]
    assert proxy.counters.stalled == 1


def test_one_download_stalls(server: StandIn, proxy: Proxy, store: Any, impatient_store: Any) -> None:
    server.objects.put("bucket/a", bytes(300_000))
    proxy.stall_next(200_000)
    with pytest.raises(GenericError, match="Timeout"):
        obstore.get(impatient_store, "a").bytes()
    assert len(obstore.get(store, "a").bytes()) == 300_000
    assert proxy.counters.stalled == 1


def test_silent_proxy_answers_after_resuming(server: StandIn, proxy: Proxy, store: Any) -> None:
    proxy.turn_silent()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        putting = pool.submit(obstore.put, store, "a", b"1")
        with pytest.raises(TimeoutError):
            putting.result(timeout=0.1)
        assert not server.requests
        proxy.resume()
        putting.result(timeout=30)
    assert "bucket/a" in server.objects.content
