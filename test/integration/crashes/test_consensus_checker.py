"""SGLang's rank consensus checker, which releases from 0.5.19 on have, ends a real server whose ranks diverge."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from integration.import_hook import write_site
from integration.scenario import PATIENCE, Wreck, break_one
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


@pytest.fixture(scope="module")
def wrecked(tmp_path_factory: pytest.TempPathFactory) -> Wreck:
    site = tmp_path_factory.mktemp("site")
    environ = write_site(site, CODE, "sglang.srt.utils.rank_consensus_checker") | PATIENCE
    environ["SGLANG_ENABLE_RANK_CONSENSUS_CHECKER"] = "1"
    fault = partial(diverge, site)
    return break_one("0.5.23", tmp_path_factory.mktemp("crash"), fault, tp=2, env=environ)


def diverge(site: Path, server: Server) -> None:
    """Have a rank differ; what is compared is what they do to the cache, as when a request is given up."""
    (site / "diverge").touch()
    server.ask_later("generate", greedy("Hello", 4000), 5.0)


def test_its_events_are_the_divergence_and_no_request_is_suspected(wrecked: Wreck) -> None:
    incident = wrecked.incident
    assert (incident["verdict"]["kind"], incident["verdict"]["level"]) == ("consensus_check", "established")
    assert incident["verdict"]["first_failure"] is None, "either rank may end first"
    assert incident["divergence"]["kind"] == "consensus"
    assert " (odd)" in incident["divergence"]["statement"]
    assert incident["cause"]["class"] == "consensus_check"
    assert incident["suspects"] == []
    assert any("was in step" in one for one in incident["verdict"]["basis"])
