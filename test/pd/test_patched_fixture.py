"""The fixture that a patched release ships, with stand-ins for its servers: in place early, quiet at its teardown."""

from __future__ import annotations

import subprocess

import pytest

from lanelib.lanes import ensure_lane

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

TIMEOUT_S = 300
#: The first class is torn down as always; the second one loses prefill before decode and router are there.
TESTS = """
import subprocess, sys, time, unittest
from sglang.test.server_fixtures.disaggregation_fixture import PDDisaggregationServerBase
from sglang.test.test_utils import start_subprocess_fail_fast_watcher

def start():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])

class Test1Healthy(PDDisaggregationServerBase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.process_prefill, cls.process_decode, cls.process_lb = start(), start(), start()
        # What the fixture itself does in releases that have a watcher: there is only one then.
        members = [("prefill", cls.process_prefill), ("decode", cls.process_decode), ("lb", cls.process_lb)]
        cls.own_watch = start_subprocess_fail_fast_watcher(members)
        assert cls.own_watch is cls._crashkit_watcher.stopped

    def test_it(self):
        time.sleep(0.5)

class Test2Broken(PDDisaggregationServerBase):
    @classmethod
    def setUpClass(cls):
        assert Test1Healthy.own_watch.is_set()
        super().setUpClass()
        cls.process_prefill = start()
        time.sleep(0.5)
        print("prefill", cls.process_prefill.pid, file=sys.stderr, flush=True)
        cls.process_prefill.kill()
        time.sleep(60)

    def test_it(self):
        pass

unittest.main(argv=["pd", "-v"])
"""


@pytest.mark.parametrize("release", ["0.5.9", "0.5.12.post1", "0.5.23"])
def test_the_fixture_watches_each_process_until_the_teardown(release: str) -> None:
    lane = ensure_lane(release)
    done = subprocess.run(
        [lane.python, "-c", TESTS], env=lane.serve_env(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    before, found, after = done.stderr.partition("\nprefill ")
    assert found, done.stderr
    assert "test_it (__main__.Test1Healthy.test_it) ... " in before
    assert "FAIL-FAST" not in before
    pid = after.split()[0]
    assert f"[FIXTURE FAIL-FAST] prefill (pid={pid}) exited rc=-9; aborting." in after
    assert done.returncode == 137
