"""A child forked during a pause of the garbage collector keeps the setting of the user."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.timeout(60)


FORKED = """
import gc, os, sys, warnings
from jaxckpt_train.store.threads import paused_collection
warnings.simplefilter("ignore")

def is_on():
    return gc.isenabled() and gc.get_threshold()[0] > 0

def child():
    assert is_on() is (sys.argv[1] != "off"), is_on()
    with paused_collection():
        assert not is_on()
    assert is_on() is (sys.argv[1] != "off"), is_on()

def forked():
    number = os.fork()
    if number == 0:
        status = 1
        try:
            child()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])

if sys.argv[1] == "paused":
    with paused_collection():
        status = forked()
        assert not is_on()
else:
    if sys.argv[1] == "off":
        gc.disable()
    status = forked()
assert is_on() is (sys.argv[1] != "off")
sys.exit(status)
"""


@pytest.mark.parametrize("parent", ["paused", "on", "off"])
def test_forked_child_keeps_the_collector_setting(run_python: Any, parent: str) -> None:
    run_python(FORKED, parent, check=True, timeout_s=60)
