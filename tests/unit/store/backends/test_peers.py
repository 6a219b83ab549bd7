"""Files of other hosts over real sockets: what is refused, and that nothing else is served."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.store.backends import peers
from jaxckpt_train.store.backends.peers import Connection, FileServer, FrameError, Peer
from tests.support.forking import Tell, ended, started

TOKEN = b"t" * 32


@contextlib.contextmanager
def served(folder: Path, token: bytes = TOKEN) -> Iterator[Peer]:
    """Serve a folder, and yield a client that has this token."""
    server = FileServer(str(folder), TOKEN, "127.0.0.1")
    peer = Peer(1, server.address, token, 5.0)
    try:
        yield peer
    finally:
        peer.close()
        server.close()


@contextlib.contextmanager
def pair() -> Iterator[tuple[Connection, Connection, socket.socket, socket.socket]]:
    """Two connected sides of a connection, and their sockets."""
    one, other = socket.socketpair()
    for side in (one, other):
        side.settimeout(5.0)
    made = list[Connection]()
    thread = threading.Thread(target=lambda: made.append(Connection(other, TOKEN, is_server=True)))
    thread.start()
    client = Connection(one, TOKEN, is_server=False)
    thread.join()
    try:
        yield client, made[0], one, other
    finally:
        one.close()
        other.close()


@pytest.mark.parametrize("is_unchecked", [False, True])
def test_files_are_read(tmp_path: Path, is_unchecked: bool) -> None:
    content = np.random.default_rng(1).integers(0, 256, 3 * peers.MAX_PAYLOAD_BYTES + 17, np.uint8)
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "data").write_bytes(content.tobytes())
    with served(tmp_path) as peer:
        source = peer.open("step/data", is_unchecked=is_unchecked)
        found = np.empty(len(content), np.uint8)
        source.read_into(0, found, len(found))
        assert source.size == len(content)
        assert np.array_equal(found, content)
        part = np.empty(100, np.uint8)
        source.read_into(5_000_000, part, 100)
        assert np.array_equal(part, content[5_000_000:5_000_100])
        with pytest.raises(CorruptCheckpointError):
            source.read_into(len(content) - 50, part, 100)
        with pytest.raises(StorageError) as missing:
            peer.open("step/other")
        assert missing.value.errno == 2


@pytest.mark.parametrize(
    "path", ["../secret", "step/../../secret", "/etc/passwd", "", ".", "step//data", "link/secret", "to"]
)
def test_nothing_outside_of_the_directory_is_served(tmp_path: Path, path: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret").write_bytes(b"secret")
    (root / "link").symlink_to(tmp_path)
    (root / "to").symlink_to(tmp_path / "secret")
    with served(root) as peer, pytest.raises(StorageError):
        peer.open(path)


@pytest.mark.parametrize("is_unchecked", [False, True])
@pytest.mark.parametrize("offset", [-1, 1 << 63, (1 << 63) - 1, (1 << 64) - 1])
def test_offset_that_no_file_has_is_refused_at_once(tmp_path: Path, offset: int, is_unchecked: bool) -> None:
    (tmp_path / "data").write_bytes(b"data")
    with served(tmp_path) as peer:
        with pytest.raises(StorageError) as refused:
            peer.read_into("data", offset, np.empty(4, np.uint8), is_unchecked=is_unchecked)
        assert refused.value.errno == errno.EINVAL
        assert peer.open("data").size == 4


def test_server_outlives_a_thread_that_cannot_start(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"data")
    with served(tmp_path) as peer:
        before = threading.stack_size(1 << 46)  # more than the system gives
        try:
            with socket.create_connection(peer._address, 5.0) as link:
                assert link.recv(1) == b""
        finally:
            threading.stack_size(before)
        assert peer.open("data").size == 4


def test_server_without_memory_says_so_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").write_bytes(b"data")

    with served(tmp_path) as peer:
        with monkeypatch.context() as patched:
            patched.setattr(peers.np, "empty", _no_memory)
            into = np.zeros(4, np.uint8)
            with pytest.raises(StorageError) as refused:
                peer.read_into("data", 0, into)
        assert refused.value.errno == errno.ENOMEM
        peer.read_into("data", 0, into)
        assert into.tobytes() == b"data"


def _no_memory(size: int, dtype: type) -> np.ndarray:
    if size:
        raise MemoryError
    return np.zeros(size, dtype)


def test_unchecked_request_for_no_bytes_is_answered(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"data")
    with served(tmp_path) as peer:
        asked = peers._Request("data", 0, 0, is_unchecked=True)
        assert peer._ask(asked, None).size == 4
        (connection,) = peer._idle
        assert peer._ask(asked, None).size == 4
        assert peer._idle == [connection]


def test_file_that_sendfile_refuses_is_read_by_other_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").write_bytes(b"0123456789")
    monkeypatch.setattr(os, "sendfile", functools.partial(_refuse, errno.EINVAL))
    found = np.empty(4, np.uint8)
    with served(tmp_path) as peer:
        peer.read_into("data", 3, found, is_unchecked=True)
    assert found.tobytes() == b"3456"


def test_server_logs_that_its_disk_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "data").write_bytes(b"data")
    monkeypatch.setattr(socket.socket, "sendfile", functools.partial(_refuse, errno.EIO))
    with served(tmp_path) as peer, pytest.raises(StorageError):
        peer.read_into("data", 0, np.empty(4, np.uint8), is_unchecked=True)
    for thread in [each for each in threading.enumerate() if each.name.startswith("jaxckpt-peer-")]:
        thread.join()
    assert "could not be read" in caplog.text


def _refuse(code: int, *arguments: object) -> int:
    raise OSError(code, os.strerror(code))


def test_wrong_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"data")
    with served(tmp_path, b"u" * 32) as peer, pytest.raises(StorageError):
        peer.open("data")


def test_many_strangers_fill_no_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.closing(FileServer(str(tmp_path), TOKEN, "127.0.0.1")) as server:
        for _ in range(20):
            with socket.create_connection(server.address) as stranger:
                stranger.sendall(bytes(200))
                with contextlib.suppress(ConnectionResetError):
                    while stranger.recv(1000):
                        pass
    for thread in [each for each in threading.enumerate() if each.name.startswith("jaxckpt-peer-")]:
        thread.join()
    assert [record.getMessage().split("number ")[1][:2] for record in caplog.records] == ["1)", "2)", "4)", "8)", "16"]


def test_server_that_does_not_know_the_token_is_refused() -> None:
    one, other = socket.socketpair()
    with contextlib.closing(one), contextlib.closing(other):
        other.sendall(b"JCK1" + bytes(32) + bytes(32))
        with pytest.raises(FrameError, match="token"):
            Connection(one, TOKEN, is_server=False)


def test_own_proof_sent_back_is_refused() -> None:
    """A server that only repeats what it hears does not prove anything."""
    one, other = socket.socketpair()

    def repeat() -> None:
        for size in (36, 32):
            other.sendall(other.recv(size, socket.MSG_WAITALL))

    with contextlib.closing(one), contextlib.closing(other):
        thread = threading.Thread(target=repeat)
        thread.start()
        with pytest.raises(FrameError, match="token"):
            Connection(one, TOKEN, is_server=False)
        thread.join()


def test_repeated_frame_is_refused() -> None:
    with pair() as (client, server, one, _):
        sent = list[bytes]()
        recorder = _Recorder(one, sent)
        client._link = recorder  # type: ignore[assignment]
        client.send(1, peers._Request("a", 0, 0))
        assert server.receive()[0] == 1
        for data in sent:
            one.sendall(data)
        with pytest.raises(FrameError, match="before"):
            server.receive()


class _Recorder:
    def __init__(self, link: socket.socket, sent: list[bytes]) -> None:
        self._link, self._sent = link, sent

    def sendall(self, data: bytes) -> None:
        self._sent.append(bytes(data))
        self._link.sendall(data)


@pytest.mark.parametrize("place", [*range(peers._HEADER.size), peers._HEADER.size + 3])
def test_each_changed_byte_of_a_frame_is_refused(place: int) -> None:
    with pair() as (client, server, one, _):
        sent = list[bytes]()
        client._link = _Recorder(_Nowhere(), sent)  # type: ignore[arg-type,assignment]
        client.send(1, peers._Request("some/file", 0, 0))
        frame = bytearray(b"".join(sent))
        frame[place] ^= 1
        one.sendall(frame)
        one.shutdown(socket.SHUT_WR)
        with pytest.raises(FrameError):
            server.receive()


class _Nowhere:
    def sendall(self, data: bytes) -> None:
        pass


def test_changed_payload_is_refused() -> None:
    with pair() as (client, server, one, _):
        sent = list[bytes]()
        client._link = _Recorder(_Nowhere(), sent)  # type: ignore[arg-type,assignment]
        client.send(2, peers._Content(8, 0), np.arange(8, dtype=np.uint8))
        frame = bytearray(b"".join(sent))
        frame[-1] ^= 1
        one.sendall(frame)
        with pytest.raises(FrameError, match="changed"):
            server.receive(np.empty(8, np.uint8))


@pytest.mark.parametrize(("body", "payload"), [(1 << 31, 0), (0, 1 << 31), (peers.MAX_BODY_BYTES + 1, 0)])
def test_oversized_claim_is_refused_before_memory_is_taken(body: int, payload: int) -> None:
    with pair() as (_, server, one, _):
        one.sendall(struct.pack(">4sQBII16s16s", b"JCK1", 0, 1, body, payload, b"", b""))
        with pytest.raises(FrameError, match="header"):
            server.receive()


def test_closed_server_ends_its_clients(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"data")
    with served(tmp_path) as peer:
        peer.open("data")
    with pytest.raises(StorageError):
        peer.open("data")


def test_file_that_ends_on_the_way_is_an_error(tmp_path: Path) -> None:
    """Not a wait for another connection: the next copy of the file is to be read at once."""
    link, asked = socket.create_server(("127.0.0.1", 0)), list[int]()

    def serve() -> None:
        accepted, _ = link.accept()
        with accepted:
            connection = Connection(accepted, TOKEN, is_server=True)
            asked.append(connection.receive()[0])
            connection._send_head(peers._CONTENT, peers._Content(100, 0), 100, b"")
            accepted.sendall(b"too short")

    with link, contextlib.closing(Peer(1, link.getsockname(), TOKEN, 30.0)) as peer:
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(StorageError):
            peer.read_into("data", 0, np.empty(100, np.uint8), is_unchecked=True)
        thread.join()
        assert asked == [peers._REQUEST]


def test_server_that_was_restarted_is_reached_again(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"data")
    with served(tmp_path) as peer:
        peer.open("data")
        for connection in peer._idle:
            connection._link.shutdown(socket.SHUT_RDWR)
        assert peer.open("data").size == 4


def test_many_connections_at_once(tmp_path: Path) -> None:
    content = np.random.default_rng(2).integers(0, 256, 1 << 20, np.uint8)
    (tmp_path / "data").write_bytes(content.tobytes())
    wrong = list[int]()
    with served(tmp_path) as peer:

        def read(number: int) -> None:
            found = np.empty(len(content), np.uint8)
            peer.open("data").read_into(0, found, len(found))
            if not np.array_equal(found, content):
                wrong.append(number)

        threads = [threading.Thread(target=read, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


@contextlib.contextmanager
def clients_of(first: Peer) -> Iterator[list[Peer]]:
    """A hundred clients of the same server."""
    clients = [Peer(number, first._address, TOKEN, 20.0) for number in range(100)]
    try:
        yield clients
    finally:
        for client in clients:
            client.close()


def test_idle_clients_make_room_for_others(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"data")
    with served(tmp_path) as peer, clients_of(peer) as clients:
        for client in [*clients, *clients]:
            assert client.open("data").size == 4


def test_clients_that_read_at_once_all_get_their_bytes(tmp_path: Path) -> None:
    content = np.random.default_rng(3).integers(0, 256, 1 << 16, np.uint8)
    (tmp_path / "data").write_bytes(content.tobytes())

    def read(client: Peer) -> bool:
        found = np.empty((5, len(content)), np.uint8)
        for row in found:
            client.open("data").read_into(0, row, len(row))
        return bool((found == content).all())

    with served(tmp_path) as peer, clients_of(peer) as clients, ThreadPoolExecutor(len(clients)) as pool:
        assert list(pool.map(read, clients)) == [True] * len(clients)


def test_silent_strangers_keep_nobody_out(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"data")
    with served(tmp_path) as peer, contextlib.ExitStack() as strangers:
        for _ in range(100):
            strangers.enter_context(socket.create_connection(peer._address, 5))
        assert peer.open("data").size == 4


@pytest.mark.filterwarnings("ignore:os.fork")  # JAX has threads, which the child does not use
def test_forked_child_holds_no_socket(tmp_path: Path) -> None:
    server = FileServer(str(tmp_path), TOKEN, "127.0.0.1")
    go, waits = os.pipe()

    def wait(tell: Tell) -> None:
        tell("started", True)
        os.read(go, 1)

    child = started(wait)
    assert b"started" in os.read(child.reports, 100)
    server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(server.address, 5)
    os.write(waits, b"1")
    ended(child)
    os.close(go)
    os.close(waits)
