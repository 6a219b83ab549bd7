"""Notices of Google Compute Engine: a Spot VM that is preempted, maintenance of the host; TPU VMs included."""

from __future__ import annotations

import functools
import re
from typing import Literal

from jaxckpt_train.notices.metadata_server import Answer, MetadataServer, NoAnswerError
from jaxckpt_train.notices.poller import PolledSource, Poller
from jaxckpt_train.notices.source import Notice
from jaxckpt_train.value_checks import one_of

URL = "http://metadata.google.internal"
_FOLDER = "/computeMetadata/v1/instance/"
_FLAVOR = {"Metadata-Flavor": "Google"}
_NO_EVENT, _MIGRATION = "NONE", "MIGRATE_ON_HOST_MAINTENANCE"
_EVENT = re.compile("[A-Z]{1,20}(_[A-Z]{1,20}){1,9}")  # not what is left of NONE when a connection breaks
_HINT = "does this run on Google Compute Engine? Else leave this source out of `notices`"

OnMaintenance = Literal["terminate", "any", "ignore"]


class GceNotice(PolledSource):
    """Asks the metadata server of Google Compute Engine whether this VM is being preempted, or its host maintained.

    A Spot VM is gone some 30 s after its notice. `maintenance-event` tells of maintenance 60 s before, and of a VM with
    GPUs, which cannot be migrated, an hour before.

    Args:
        poll_s: seconds between two looks; of a notice of 30 s this is lost.
        timeout_s: seconds that one request may take.
        on_maintenance: what maintenance of the host asks the job to leave: "terminate": all but a live migration, which
            only pauses the machine for a moment; "any": that too; "ignore": none.
        url: of the metadata server.

    Raises:
        SettingsError: an argument is wrong.

    Sources: cloud.google.com/compute/docs/instances/create-use-spot and .../docs/metadata/getting-live-migration-notice
    """

    def __init__(
        self,
        poll_s: float = 1.0,
        timeout_s: float = 2.0,
        on_maintenance: OnMaintenance = "terminate",
        url: str = URL,
    ) -> None:
        one_of("terminate", "any", "ignore")("GceNotice: on_maintenance", on_maintenance)
        look = functools.partial(_look, on_maintenance)
        super().__init__(Poller("GceNotice", url, poll_s, timeout_s, lambda: look, _HINT))


def _look(on_maintenance: OnMaintenance, server: MetadataServer) -> Notice | None:
    """Ask for both, since either may be hidden, as by the metadata server of GKE."""
    problem: NoAnswerError | None = None
    for look in (_preempted, functools.partial(_maintained, on_maintenance)):
        try:
            found = look(server)
        except NoAnswerError as error:
            problem = problem or error
        else:
            if found is not None:
                return found
    if problem is not None:
        raise problem
    return None


def _preempted(server: MetadataServer) -> Notice | None:
    answer = _asked(server, "preempted")
    if answer.text() not in ("TRUE", "FALSE"):
        raise answer.unusable("TRUE or FALSE")
    return Notice("Google Compute Engine, which preempts this machine") if answer.text() == "TRUE" else None


def _maintained(on_maintenance: OnMaintenance, server: MetadataServer) -> Notice | None:
    if on_maintenance == "ignore":
        return None
    answer = _asked(server, "maintenance-event")
    event = answer.text()
    if event == _NO_EVENT or (event == _MIGRATION and on_maintenance != "any"):
        return None
    if not _EVENT.fullmatch(event):
        raise answer.unusable("NONE or the name of an event, such as TERMINATE_ON_HOST_MAINTENANCE")
    return Notice(f"Google Compute Engine, which announces {event}")


def _asked(server: MetadataServer, key: str) -> Answer:
    """Raises NoAnswerError also for what others answer: only the metadata server sends the header back."""
    answer = server.ask(_FOLDER + key, _FLAVOR)
    if answer.headers.get("Metadata-Flavor") != "Google":
        raise answer.unusable("the header Metadata-Flavor: Google, without which this is no metadata server")
    if answer.status != 200:
        raise answer.unusable("status 200")
    return answer
