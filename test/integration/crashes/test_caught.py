"""A real scheduler reports a fault that it caught, as SGLang's pull request 40078 has it, and serves on."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.import_hook import write_site
from integration.scenario import serving, whole_incidents
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(600)]

LONG = 120.0
CODE = """
def change(module):
    if module.__name__.endswith("io_struct"):
        class FaultToleranceRankFaultOutput(module.BaseReq, kw_only=True):
            rank: int
            message: str

        FaultToleranceRankFaultOutput.__module__ = module.__name__
        module.FaultToleranceRankFaultOutput = FaultToleranceRankFaultOutput
        return
    from sglang.srt.managers.io_struct import FaultToleranceRankFaultOutput

    handle = module.Scheduler.handle_generate_request
    module.FaultToleranceRankFaultOutput = FaultToleranceRankFaultOutput

    def handle_or_report(scheduler, request, *more):
        try:
            if request.sampling_params.max_new_tokens == 13:
                raise ValueError("no such page")
        except ValueError as error:
            module.FaultToleranceRankFaultOutput(rank=0, message=str(error))
        return handle(scheduler, request, *more)

    module.Scheduler.handle_generate_request = handle_or_report
"""


def test_a_fault_that_is_caught_is_one_incident_and_the_server_serves_on(tmp_path: Path) -> None:
    folder = tmp_path / "crash"
    env = write_site(tmp_path / "site", CODE, "sglang.srt.managers.io_struct", "sglang.srt.managers.scheduler")
    with serving("0.5.23", folder, env=env) as server:
        for _ in range(2):
            assert len(server.generate("Hello", max_new_tokens=13, timeout_s=LONG)["output_ids"]) == 13
        (stored,) = wait_until(lambda: whole_incidents(folder), "its incident", LONG)
        assert len(server.generate("Hello", max_new_tokens=4, timeout_s=LONG)["output_ids"]) == 4
    document = stored.document or {}
    assert (document["kind"], document["requests"]["reason"]) == ("exception", "the server went on")
    assert "raised ValueError: no such page, which SGLang caught; it serves on." in document["verdict"]["basis"][0]
    assert len(whole_incidents(folder)) == 1
