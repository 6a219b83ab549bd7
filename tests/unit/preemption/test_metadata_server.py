"""One request to a metadata server: limited in time and size."""

from __future__ import annotations

import re

import pytest

from jaxckpt_train.preemption.clouds import MetadataServer, NoAnswerError
from tests.support.metadata_servers import (
    Handler,
    Respond,
    Server,
    break_off,
    close,
    endless,
    hang,
    no_http,
    send,
)


@pytest.mark.parametrize(
    ("misbehave", "said"),
    [
        (hang, "timed out"),
        (endless, "longer than 16384 bytes"),
        (break_off, "the answer is incomplete"),
        (close, "closed|reset"),
        (no_http, "SSH-2.0"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_invalid_answer_error_names_the_request(misbehave: Respond, said: str) -> None:
    with Server(misbehave) as server:
        asked = MetadataServer("url", f"{server.url}/", 0.2)
        with pytest.raises(NoAnswerError, match=said) as caught:
            asked.ask("/a", {})
        assert str(caught.value).startswith(f"GET {server.url}/a: ")
        assert len(str(caught.value)) < 300


def test_any_status_is_an_answer() -> None:
    def echo(handler: Handler, server: Server) -> None:
        send(handler, 404, f"{handler.command} {handler.headers['X-Token']}".encode(), X_Back="yes")

    with Server(echo) as server:
        answer = MetadataServer("url", server.url, 60.0).ask("/a/b", {"X-Token": "secret"}, method="PUT")
        assert (answer.status, answer.text(), answer.headers["x-back"]) == (404, "PUT secret", "yes")
        assert server.wait_for(1) == ["PUT /a/b"]


def test_body_up_to_the_limit_is_read() -> None:
    for size, fits in ((16384, True), (16385, False)):
        with Server(lambda handler, _, size=size: send(handler, 200, b"x" * size)) as server:
            asked = MetadataServer("url", server.url, 60.0)
            if fits:
                assert len(asked.ask("/", {}).body) == size
            else:
                with pytest.raises(NoAnswerError, match="longer than"):
                    asked.ask("/", {})


def test_unusable_answer_is_shown_shortened() -> None:
    with Server(lambda handler, _: send(handler, 200, bytes(range(256)) * 20)) as server:
        error = MetadataServer("url", server.url, 60.0).ask("/", {}).unusable("TRUE")
        assert str(error).startswith(f"GET {server.url}/: expected TRUE, found status 200 and '")
        assert len(str(error)) < 300


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"\x1b[2J\x1b]0;owned\x07" + b"A" * 56000, r"BadStatusLine '\\x1b\[2J\\x1b\]0;owned\\x07A*'\.\.\.$"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: \x1b[2J\r\n\r\n", r"the answer|RemoteDisconnected|$"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\x1b[2J" + b"z" * 9000, ""),
        (b"HTTP/1.1 200 OK\r\n" + b"X: \x1b[2J" * 20000, ""),
        (b"HTTP/1.1 999999 \x1b[2J\r\n\r\n", "BadStatusLine"),
    ],
    ids=["no status line", "length", "chunks", "header", "status"],
)
def test_server_text_is_escaped_and_shortened(sent: bytes, said: str) -> None:
    def respond(handler: Handler, server: Server) -> None:
        handler.wfile.write(sent)
        handler.wfile.flush()
        handler.close_connection = True

    with Server(respond) as server:
        try:
            answer = MetadataServer("url", server.url, 60.0).ask("/", {})
        except NoAnswerError as error:
            message = str(error)
        else:
            message = str(answer.unusable("TRUE"))
        assert message.isprintable()
        assert len(message) < 300
        assert re.search(said, message), message
