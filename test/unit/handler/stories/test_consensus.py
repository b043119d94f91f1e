"""SGLang's rank consensus checker ends the ranks of a server, the healthy one first; in upstream's own words."""

from __future__ import annotations

import json

from unit.support.server_driver import Start

SAME = "get_next_batch_to_run called params=<no check>"
TOLD = (
    "SGLang's rank consensus checker found that the ranks diverged: TP0: x returns result=1; TP1: x returns result=2."
)


def test_the_divergence_is_the_cause_and_no_request_is(start_server: Start) -> None:
    server = start_server()
    for rank in ("scheduler_TP0", "scheduler_TP1"):
        server.ask(f"tell {rank} step 3 only-one")
    for number, rank in enumerate(("scheduler_TP0", "scheduler_TP1"), 1):
        server.say(f"tell {rank} diverge {json.dumps([SAME, f'x returns result={number}'])}")
    document = server.incident().document
    assert (document["kind"], document["verdict"]["kind"]) == ("exited", "consensus_check")
    assert (document["verdict"]["level"], document["verdict"]["first_failure"]) == ("established", None)
    assert document["verdict"]["basis"][0] == document["divergence"]["statement"] == TOLD
    assert any("with 1 requests: only-one" in one for one in document["verdict"]["basis"])
    assert (document["cause"]["class"], document["cause"]["level"]) == ("consensus_check", "established")
    assert document["suspects"] == []
    assert not any("--bisect" in step for step in document["cause"]["next_steps"])
    assert "No divergence" not in json.dumps(document)
