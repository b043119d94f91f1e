"""The prefill server of a real pair becomes a decode server, and prefill again: a wanted change loses no peer."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from lanelib.lanes import ensure_lane
from pd.pairs import NEEDED, serving
from sglang_crashkit.incident.store import find_incidents

pytestmark = [pytest.mark.live, pytest.mark.timeout(600), NEEDED]

OPTION = "--enable-pd-role-switch"
#: SGLang's heartbeat asks every 5 s, and gives a server up after 2 failures.
NOTICED_S = 20.0


def test_a_role_switch_is_no_lost_peer(tmp_path: Path, pd_release: str, pd_device: str) -> None:
    lane = ensure_lane(pd_release)
    if not lane.knows_option(OPTION):
        pytest.skip(f"{pd_release} has no role switch")
    folder = tmp_path / "crash"
    with serving(lane, pd_device, folder, OPTION) as pair:
        for role in ("decode", "prefill"):
            # Without a GPU the graphs that a decode server captures take nothing.
            body = {"new_role": role, "decode_cuda_graph_memory_gb": 0.0}
            answer = json.loads(pair.prefill.ask("pd_role_switch", body))
            assert (answer["success"], answer["new_role"]) == (True, role), answer
            time.sleep(NOTICED_S)
            assert find_incidents(folder) == []
        # What a decode server that was there before asks of it then stands in upstream, too.
        assert pair.prefill.poll_ready()
        assert pair.decode.poll_ready()
