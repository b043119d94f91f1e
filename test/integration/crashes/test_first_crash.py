"""A two-rank server loses one rank to SIGKILL: the incident says which, of what, and what the survivor did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from integration.crashes.whole import assert_whole
from integration.faults import TP0 as SURVIVOR
from integration.faults import TP1 as VICTIM
from integration.faults import send
from integration.requests.test_journal import READ_PICKLE
from integration.scenario import PATIENCE, PROMPTS, Sent, Wreck, answers_of, run_in_lane, serving, wreck
from lanelib.lanes import Lane
from sglang_crashkit.incident.exit_status import ServerExit

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

REQUESTS = 3


@pytest.fixture(scope="module")
def crash(end_lane: Lane, tmp_path_factory: pytest.TempPathFactory) -> Wreck:
    folder = tmp_path_factory.mktemp("crash")
    with serving(end_lane, folder, tp=2, env=PATIENCE) as server:
        answers_of(server)
        return wreck(server, folder, send(VICTIM), requests=REQUESTS)


def test_the_incident_names_the_killed_rank_and_its_signal(crash: Wreck) -> None:
    verdict = crash.incident["verdict"]
    assert verdict["first_failure"] == {"pid": crash.pids[VICTIM], "title": VICTIM}
    assert (verdict["kind"], verdict["level"]) == ("signal", "established")
    # On a busy machine the survivor, whose collective broke, may be heard first.
    assert crash.incident["trigger"]["title"] in (VICTIM, SURVIVOR)


def test_the_incident_says_what_the_survivor_was_doing(crash: Wreck) -> None:
    report = crash.report(SURVIVOR)
    assert report["rank"] == {"tp": 0}
    assert any("sglang/srt" in frame or "torch/" in frame for frame in report["doing"]), report["doing"]
    stack = crash.evidence(SURVIVOR, "stack")
    assert stack["status"] == "captured"
    text = (crash.folder / stack["path"]).read_text()
    assert "run_scheduler_process" in text
    # A survivor whose collective broke before it was captured has left the loop; its own record says from where.
    records = [piece for piece in report["evidence"] if piece["kind"] == "exception"]
    text += "".join((crash.folder / piece["path"]).read_text() for piece in records)
    assert "event_loop" in text


def test_every_process_that_lived_has_a_stack(crash: Wreck) -> None:
    assert_whole(crash, {VICTIM: ("signal", "SIGKILL")})
    for process in crash.incident["processes"]:
        # SGLang compiles kernels when it first needs them; a compiler has no Python stack.
        if process["exit"] is None and process["role"] != "helper":
            kinds = {piece["kind"]: piece["status"] for piece in process["evidence"]}
            assert kinds["stack"] == "captured", process
            assert kinds["proc_state"] == "captured", process


def test_what_surrounded_the_server_is_told(end_lane: Lane, crash: Wreck) -> None:
    environment = json.loads((crash.folder / "environment.json").read_text())
    assert (Path(environment["model"]).is_dir(), environment["parallel"]["tp"]) == (True, 2)
    assert environment["arguments"]["tp_size"] == 2
    assert "sglang.launch_server" in environment["command_line"]
    versions = environment["versions"]
    assert versions["sglang"].split("+")[0] == end_lane.release
    assert {"torch", "transformers", "sglang-crashkit", "python"} <= set(versions)
    assert environment["started"] < environment["ready_since"] < crash.incident["trigger"]["time"]
    told = {one["title"]: one for one in environment["processes"]}
    assert told[SURVIVOR]["open_files"] > 0
    assert told[SURVIVOR]["limits"]["open_files"]["soft"] > 0
    assert environment["cgroup"]
    assert environment["shared_memory"]["total_bytes"] > 0
    assert crash.incident["environment"]["versions"] == versions
    assert f"- model: {environment['model']}, tp 2\n" in (crash.folder / "summary.md").read_text()


def test_every_process_of_the_server_left_its_log(crash: Wreck) -> None:
    own = [one for one in crash.incident["processes"] if one["role"] not in ("helper", "starting")]
    assert {"server", "scheduler", "detokenizer"} <= {one["role"] for one in own}
    texts = {}
    for process in own:
        (piece,) = [piece for piece in process["evidence"] if piece["kind"] == "log"]
        # A detokenizer may have nothing to say.
        assert piece["status"] == "captured" or piece["reason"] == "it logged nothing", piece
        texts[process["title"]] = (crash.folder / piece["path"]).read_text() if piece["path"] else ""
    assert "INFO sglang.srt" in texts[VICTIM]
    assert "INFO sglang.srt" in texts[SURVIVOR]
    assert any("server_args=" in text for text in texts.values())


def test_without_a_gpu_the_flight_recorder_is_not_waited_for(crash: Wreck) -> None:
    piece = crash.evidence(SURVIVOR, "flight_recorder")
    assert (piece["status"], piece["seconds"]) == ("skipped", None)
    # It was told where to listen, and there was no one to do so.
    assert piece["reason"].startswith("there is no pipe ")
    assert piece["reason"].endswith(".nccl-<rank>.pipe: NCCL was not initialised")
    # Those of gloo, which the survivor told.
    assert all("gloo" in finding["group"] for finding in crash.incident["collectives"]["findings"])


def test_each_rank_left_its_last_steps_and_they_agree(crash: Wreck) -> None:
    steps, in_flight = {}, {request.rid for request in crash.sent}
    for title in (VICTIM, SURVIVOR):
        piece = crash.evidence(title, "steps")
        assert piece["status"] == "captured", piece
        steps[title] = [json.loads(line) for line in (crash.folder / piece["path"]).read_text().splitlines()]
    victim, survivor = ({step["number"]: step for step in steps[title]} for title in (VICTIM, SURVIVOR))
    common = sorted(victim.keys() & survivor.keys())
    assert len(common) > 16 * len(PROMPTS)
    for number in common:
        for name in ("agreed_hash", "mode", "requests", "size", "tokens", "decisions"):
            scheduled = "received" not in (victim[number]["phase"], survivor[number]["phase"])
            assert victim[number][name] == survivor[number][name] or not scheduled, (number, name)
    assert {"extend", "decode"} <= {step["mode"] for step in steps[VICTIM]}
    assert sum(step["phase"] == "processed" for step in steps[VICTIM]) >= len(common) - 3

    # The one that it died in, of the requests that were under way.
    told = crash.report(VICTIM)["steps"]
    assert told["last"][-1]["number"] == max(victim)
    assert told["in_step"]["mode"] == "decode"
    assert set(told["in_step"]["rids"]) <= in_flight
    assert told["in_step"]["rids"]
    assert 0 <= told["in_step"]["seconds"] < 60


def test_the_requests_in_flight_were_saved_where_upstream_saves_them(end_lane: Lane, crash: Wreck) -> None:
    requests = crash.incident["requests"]
    assert requests["unfinished"] == REQUESTS
    assert requests["finished"] == len(PROMPTS)
    path = Path(requests["path"])
    assert path.parent.parent == crash.crash_folder
    assert path.name.startswith("crash_dump_")
    # The file holds SGLang's own classes, and the kit's server wrote it.
    content = run_in_lane(end_lane, READ_PICKLE, path)
    assert {"server_args", "requests", "launch_command"} <= set(content["keys"])
    in_flight, saved = crash.sent, {Sent(one["rid"], one["text"]) for one in content["requests"]}
    assert saved >= set(in_flight)
    assert sorted(one.text for one in saved) == sorted([*PROMPTS, *(one.text for one in in_flight)])
    assert content["shapes"] == [4] * len(saved)


def test_what_is_missing_has_a_reason_and_the_timeline_is_in_order(end_lane: Lane, crash: Wreck) -> None:
    incident = crash.incident
    assert incident["schema_version"] == 1
    assert incident["server"]["sglang_version"].split("+")[0] == end_lane.release
    for process in incident["processes"]:
        for piece in process["evidence"]:
            assert piece["status"] == "captured" or piece["reason"], piece
    times = [entry["time"] for entry in incident["timeline"]]
    assert times == sorted(times)
    last = ("server_exited", "process_exited", "shared_memory_removed", "shared_memory_left")
    assert incident["timeline"][-1]["event"] in last


def test_the_servers_exit_status_says_that_a_rank_was_killed(crash: Wreck) -> None:
    assert crash.status == ServerExit.KILLED


def test_nothing_of_the_server_is_left_running(crash: Wreck) -> None:
    assert crash.left == []
    assert not list(crash.folder.parent.glob(".*"))
