"""SGLang's rank consensus checker, which releases from 0.5.19 on have, ends a real server whose ranks diverge."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.import_hook import write_site
from integration.scenario import PATIENCE, break_one
from lanelib.servers import Server, greedy

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(600)]

CODE = """
import os


def change(module):
    check = module.assert_same

    def changed(words, *args):
        with open("/proc/self/cmdline") as file:
            is_odd = "_TP1" in file.read() and os.path.exists(os.path.join(os.path.dirname(__file__), "diverge"))
        check(words + (" (odd)" if is_odd else ""), *args)

    module.assert_same = changed
"""


def test_its_events_are_the_divergence_and_no_request_is_suspected(tmp_path: Path) -> None:
    site = tmp_path / "site"
    environ = write_site(site, CODE, "sglang.srt.utils.rank_consensus_checker") | PATIENCE
    environ["SGLANG_ENABLE_RANK_CONSENSUS_CHECKER"] = "1"

    def diverge(server: Server) -> None:
        # What is compared is what they do to the cache, as when a request is given up.
        (site / "diverge").touch()
        server.ask_later("generate", greedy("Hello", 4000), 5.0)

    incident = break_one("0.5.23", tmp_path / "crash", diverge, tp=2, env=environ).incident
    assert (incident["verdict"]["kind"], incident["verdict"]["level"]) == ("consensus_check", "established")
    assert incident["verdict"]["first_failure"] is None, "either rank may end first"
    assert incident["divergence"]["kind"] == "consensus"
    assert " (odd)" in incident["divergence"]["statement"]
    assert incident["cause"]["class"] == "consensus_check"
    assert incident["suspects"] == []
    assert any("was in step" in one for one in incident["verdict"]["basis"])
