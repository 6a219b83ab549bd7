"""No secret is shown: in settings, errors, logs, the history, the report and stored objects."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.config import callback_arguments
from tests.support.commands import run
from tests.support.objects.access import Dialect
from tests.support.objects.calls import Answer
from tests.support.objects.faults import Silent
from tests.support.objects.stand_in import StandIn

MARK = "hushhush"  # a part of every secret here
STATE = {"w": np.arange(1000.0)}


class EchoServer(StandIn):
    """A stand-in that, when `status` is set, answers with it and repeats the request's headers.

    S3 does so in XML, and a proxy may do so in JSON or as plain text.
    """

    status = 0
    form: Literal["xml", "json", "text"] = "xml"

    def respond(self, method: str, target: str, headers: dict[str, str], body: bytes) -> tuple[Answer, int] | None:
        if not self.status:
            return super().respond(method, target, headers, body)
        if self.form != "xml":
            sent = {**headers, "AWSAccessKeyId": f"AKIA{MARK}", "url": f"http://host{target}"}
            del sent["user-agent"]  # no secret, although it has the mark
            shown = json.dumps(sent) if self.form == "json" else " ".join(f"{name}: {sent[name]}" for name in sent)
            text = f"No entry. {shown}"
            return Answer(self.status, text.encode(), {}), len(text)
        headers_text = "".join(f"{name}:{value}\n" for name, value in headers.items())
        detail = (
            f"<AWSAccessKeyId>AKIA{MARK}</AWSAccessKeyId><CanonicalRequest>{target}\n{headers_text}</CanonicalRequest>"
        )
        text = f"<?xml version='1.0'?>\n<Error><Code>Refused</Code><Message>No entry.</Message>{detail}</Error>"
        return Answer(self.status, text.encode(), {}), len(text)


def secrets(dialect: Dialect) -> dict[str, str]:
    """Credentials in the environment, by the variables of the cloud."""
    if dialect == "s3":
        return {
            "AWS_ACCESS_KEY_ID": f"AKIA{MARK}",
            "AWS_SECRET_ACCESS_KEY": f"{MARK}-key",
            "AWS_SESSION_TOKEN": f"{MARK}-session",
            "AWS_SKIP_SIGNATURE": "false",
        }
    if dialect == "azure":
        return {"AZURE_STORAGE_SAS_KEY": f"sv=2023-11-03&sr=c&sig={MARK}%3D", "AZURE_SKIP_SIGNATURE": "false"}
    return {"GOOGLE_BEARER_TOKEN": f"{MARK}-token", "GOOGLE_SKIP_SIGNATURE": "false"}


@pytest.fixture(params=["s3", "gcs", "azure"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[EchoServer]:
    """A server whose endpoint in the environment has a password."""
    with EchoServer(request.param) as started:
        for name, value in (started.environment() | secrets(request.param)).items():
            with_password = value.replace("http://", f"http://user:{MARK}@")
            monkeypatch.setenv(name, with_password)
        if request.param == "azure":
            monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
        yield started


def settings(**more: Any) -> jct.StoreSettings:
    objects = {"options": {"user_agent": f"{MARK}-agent"}, "request_timeout_s": 0.3, "retries": 0, **more}
    return jct.StoreSettings(object_store=objects)  # type: ignore[arg-type]


def shown(error: BaseException) -> str:
    """Everything that an error shows, with its causes and notes."""
    texts = [*traceback.format_exception(error)]
    chain: BaseException | None = error
    while chain is not None:
        texts += [repr(chain), str(chain), repr(vars(chain))]
        chain = chain.__cause__
    return "\n".join(texts)


def test_no_secret_is_shown(
    server: EchoServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    url, seen, chosen = server.url("run"), list[str](), settings()
    with jct.CheckpointCallback(url, save_interval_steps=1, store=chosen) as ckpt:
        ckpt.resume(STATE)
        for _ in ckpt.steps(2):
            ckpt(STATE, metrics={"loss": 1.0})
        seen += [repr(ckpt), repr(vars(ckpt)), repr(vars(ckpt.manager)), repr(ckpt.summary())]
    for command in (["ls", url], ["show", url], ["report", url, "-o", tmp_path / "report.html"], ["doctor", url]):
        seen.append(run(*command).output)
    seen.append((tmp_path / "report.html").read_text())
    seen += [f"{name} {stored.data!r}" for name, stored in server.objects.content.items()]
    for status in (400, 401, 403, 404, 500, 503):
        server.status = status
        seen += failures(server.url("a"), chosen)
    server.status = 400
    for server.form in ("json", "text"):
        seen += failures(server.url("a"), chosen)
    server.form = "xml"
    server.status = 403  # not repeated, so that a command with its default of ten tries ends soon
    seen.append(run("ls", url).output)
    server.status, server.faults = 0, Silent()
    seen += failures(server.url("a"), chosen)
    seen += [repr(chosen), repr(vars(chosen.object_store)), str(vars(chosen)), f"{chosen.object_store}"]
    seen += [caplog.text, *(f"{record.args!r} {record.exc_text}" for record in caplog.records), *capfd.readouterr()]
    found = [text[max(text.find(MARK) - 300, 0) :][:600] for text in seen if MARK in text]
    assert found == []
    assert any("No entry" in text for text in seen)


def failures(url: str, chosen: jct.StoreSettings) -> list[str]:
    """What errors of each operation show."""
    seen = list[str]()
    for act in (
        lambda: jct.save(url, STATE, settings=chosen),
        lambda: jct.load(url, settings=chosen),
        lambda: jct.verify(url, settings=chosen),
        lambda: jct.StepManager(url, settings=chosen).own(),
    ):
        with pytest.raises(jct.CheckpointError) as caught:
            act()
        seen.append(shown(caught.value))
    return seen


SECRET = {"options": {"secret_access_key": MARK}}


@pytest.mark.parametrize(
    "wrong",
    [
        {"object_store": {**SECRET, "part_bytes": 1}},
        {"object_store": {"options": {"secret_access_key": [MARK]}}},
        {"object_store": {"options": MARK}},
        {"object_store": MARK},
        {"object_store": {"endpoint": f"http://user:{MARK}@host"}},
        {"object_store": {"endpoint": f"http://host/?sig={MARK}"}},
        {"store": {"object_store": SECRET, "io_threads": 0}},
        {"store": [SECRET]},
        {"store": {"object_store": SECRET}, "object_store": {"part_bytes": 1 << 25}},
        {"directory": f"s3://user:{MARK}@bucket/run"},
        {"directory": f"az://container/run?sig={MARK}"},
        {"directory": f"https://user:{MARK}@host/run?sig={MARK}"},
    ],
)
def test_wrong_configuration_shows_no_secret(wrong: dict[str, Any]) -> None:
    with pytest.raises(jct.SettingsError) as caught:
        callback_arguments(wrong)
    assert MARK not in shown(caught.value)


def test_wrong_settings_show_no_secret(server: EchoServer) -> None:
    wrong: Any = {"object_store": SECRET}
    with pytest.raises(jct.SettingsError) as caught:
        jct.load(server.url("a"), settings=wrong)
    unknown = settings(options={"secret_acces_key": MARK, "client_secret": MARK})
    with pytest.raises(jct.SettingsError, match="object_store") as refused:
        jct.load(server.url("a"), settings=unknown)
    assert MARK not in shown(caught.value) + shown(refused.value)


def test_options_are_found_in_settings_but_not_shown() -> None:
    found = jct.ObjectStoreSettings(**SECRET)  # type: ignore[arg-type]
    assert found.options["secret_access_key"] == MARK
    assert MARK not in repr(found) + repr(vars(found)) + str(found.options)
