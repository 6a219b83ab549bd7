"""A polled source in a process that forks."""

from __future__ import annotations

import threading

from tests.support.metadata_servers import (
    Gce,
    Handler,
    Server,
)
from tests.support.runs import talking_to

FORK = """
import os, sys, threading
from jaxckpt_train.preemption.clouds import GceNotice
from jaxckpt_train.preemption.sources import WatchedSources
class Noting(GceNotice):
    def left(self, step):
        print("left", step, flush=True)
source = Noting(url=sys.argv[1], poll_s=0.02, timeout_s=60.0)
sources = WatchedSources([source])
sources.start()
print("ready", flush=True)
sys.stdin.readline()
child = os.fork()
if child == 0:
    sources.notify(4, 9.0)  # does nothing here
    sources.stop()
    assert threading.active_count() == 1 and source.notice() is None
    os._exit(7)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
while source.notice() is None:
    threading.Event().wait(0.01)
sources.notify(4, 9.0)
sources.stop()
for each in threading.enumerate():
    each.join() if each.name in ("jaxckpt-note", "jaxckpt-notice") else None
print("threads", threading.active_count(), "jax" in sys.modules)
"""


def test_forked_child_does_not_disturb_polling_parent() -> None:
    go_on, gce = threading.Event(), Gce()
    gce.values["preempted"] = "TRUE"

    def respond(handler: Handler, server: Server) -> None:
        go_on.wait()
        gce(handler, server)

    with Server(respond) as server, talking_to(FORK, server.url, fresh=True) as process:
        assert process.read() == "ready"
        assert server.wait_for(1) == ["GET /computeMetadata/v1/instance/preempted"]
        process.tell("fork")
        assert process.read() == "child 7"
        go_on.set()
        assert process.finish() == (0, "left 4\nthreads 1 False\n")
        assert server.requests.empty()
