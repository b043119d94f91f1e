from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.incident.names import without_own_numbers
from sglang_crashkit.model import UNANSWERED
from sglang_crashkit.model.incident import Entry, Incident
from sglang_crashkit.view.markdown import format_summary, format_termination_message
from sglang_crashkit.view.model import headline, runs_of, surroundings
from sglang_crashkit.view.words import details

RANK = {"role": "scheduler", "title": "sglang::scheduler_TP1", "pid": 8}
STACK = {"kind": "stack", "status": "captured", "path": "stacks/x.txt", "seconds": 0.1234}
DOCUMENT: dict[str, Any] = {
    "id": "0123abcd",
    "kind": "killed",
    "trigger": {"event": "process_exited", "time": "2023-11-14T22:13:20.000000Z", "pid": 8, "title": RANK["title"]},
    "server": {"pid": 7, "sglang_version": "0.5.23", "kit_version": "0.1.0", "hostname": "host"},
    "processes": [
        RANK
        | {"exit": {"signal": "SIGKILL", "cause": "oom_kill", "detail": "3 more"}}
        | {"evidence": [{"kind": "stack", "status": "skipped", "reason": "it was dead"}]},
        RANK
        | {"pid": 9, "title": "sglang::scheduler_TP0", "doing": ["wait (x.py:1)"]}
        | {"evidence": [STACK, {"kind": "exit", "status": "captured"}]},
        {"pid": 10, "title": "sglang::detokenizer", "role": "detokenizer"}
        | {"exit": {"code": 3, "cause": "exit_status", "detail": "no exception"}},
    ],
    "timeline": [
        {"time": "1970-01-01T00:00:02.000000Z", "event": "second", "pid": 8, "seconds": 1},
        {"time": "1970-01-01T00:00:01.000000Z", "event": "first"},
    ],
}


def summary_of(**fields: Any) -> str:
    return format_summary(Incident.of(DOCUMENT | fields).shown())


def test_a_summary_says_everything_once() -> None:
    verdict = {"kind": "oom_kill", "level": "established", "text": "It was killed."}
    requests = {"finished": 3, "unfinished": 1, "path": "/crash/x.pkl"}
    assert (
        summary_of(complete=True, verdict=verdict, requests=requests)
        == """\
# killed: who failed first is not known (reported by sglang::scheduler_TP1)

```text
It was killed; 1 request lost
when    2023-11-14 22:13:20 UTC on host
run     SGLang 0.5.23, main process 7
ranks   TP0: wait (x.py:1)
next    sglang-crashkit show 0123abcd --stacks
next    sglang-crashkit bundle 0123abcd --no-prompts   # for a bug report
```

**It was killed.** (established)

- incident: 0123abcd on host, 2023-11-14T22:13:20.000000Z
- SGLang: 0.5.23, main process 7, crash kit 0.1.0
- requests: 3 finished and 1 unfinished in /crash/x.pkl

## Processes

### sglang::scheduler_TP1 (pid 8): dead, SIGKILL (oom_kill: 3 more)
- stack: skipped (it was dead)

### sglang::scheduler_TP0 (pid 9): alive then
- wait (x.py:1)
- stack: captured (stacks/x.txt, 0.123 s)
- exit: captured (in incident.json)

### sglang::detokenizer (pid 10): dead, exit status 3 (exit_status: no exception)

## Timeline

- 1970-01-01T00:00:01.000000Z first
- 1970-01-01T00:00:02.000000Z second TP1: seconds 1
"""
    )


@pytest.mark.parametrize(
    ("left_out", "count", "listed", "not_listed"),
    [(0, "2", "all", ""), (1200, "1,202", "2", "; 1,200 more are not listed")],
)
def test_the_suspect_is_the_same_above_and_below(left_out: int, count: str, listed: str, not_listed: str) -> None:
    suspects = [{"rid": rid, "level": "unknown", "reasons": [UNANSWERED]} for rid in ("r1", "r2")]
    words = f"none of the {count} requests under way is likelier than the others"
    text = summary_of(suspects=suspects, suspects_left_out=left_out)
    assert f"\nsuspect {words}\n" in text
    assert f"\n- suspect: {words}; {listed} in incident.json\n" in text
    suspects[0]["level"] = "supported"
    found = f"\n- suspect: request r1 (supported): {UNANSWERED}; 1 more in incident.json{not_listed}\n"
    assert found in summary_of(suspects=suspects, suspects_left_out=left_out)


def test_the_verdict_is_told_without_the_builders_path() -> None:
    verdict = {"level": "established", "text": "TP1 raised: [/__w/gloo/pair.cc:561] Closed."}
    assert "\n**TP1 raised: Closed.** (established)\n" in summary_of(verdict=verdict)


def test_a_summary_names_lost_servers_and_who_waits_for_them() -> None:
    requests = [{"rid": "first", "room": 0, "since": "this morning"}, {"rid": "1", "room": 1}]
    peer = {"address": "10.0.0.2:41", "role": "decode", "sign": "failed_transfer", "since": "now"}
    peer |= {"reason": "Failed to send", "requests": requests, "count": 7}
    expected = """\
### decode server 10.0.0.2:41: failed_transfer, since now
- SGLang says: Failed to send
- waits for it: first (room 0, since this morning)
- waits for it: 1 (room 1)
- waits for it: 5 more
"""
    assert expected in summary_of(peers=[peer])


def test_the_headline_names_who_failed_and_not_who_told() -> None:
    trigger = {"event": "exception", "time": "t", "pid": 9, "title": "sglang::scheduler_TP0"}
    unknown = Incident.of(DOCUMENT | {"trigger": trigger})
    verdict = {"text": "TP1 was killed.", "level": "established", "first_failure": RANK}
    known = Incident.of(DOCUMENT | {"trigger": trigger, "verdict": verdict})
    before = "killed: who failed first is not known (reported by sglang::scheduler_TP0)"
    assert (headline(unknown), headline(known)) == (before, "killed: sglang::scheduler_TP1 (pid 8)")
    assert format_summary(known).startswith(f"# {headline(known)}\n")
    assert format_termination_message(known, "/x").startswith("TP1 was killed. (established)\n")
    assert format_termination_message(unknown, "/x").startswith(f"{before}\n")


def test_collectives_are_told_with_missing_ranks() -> None:
    told = {"group": "process group 0", "kind": "behind", "statement": "One had not begun it.", "level": "established"}
    expected = """\
## Collectives

### process group 0: behind (established)
- One had not begun it.

### No flight recorder
- sglang::scheduler_TP1 (pid 8): it was dead.

## Processes
"""
    missing = ["sglang::scheduler_TP1 (pid 8): it was dead."]
    assert expected in summary_of(collectives={"findings": [told], "missing": missing})


def test_the_last_steps_of_the_first_failure_name_their_requests() -> None:
    document = deepcopy(DOCUMENT)
    document["divergence"] = {"statement": "TP1 went another way.", "level": "established", "kind": "mode"}
    request = {"rid": "ab12", "id_hash": 1, "tokens": 37, "length": 37}
    done = {
        "number": 18203,
        "mode": "decode",
        "phase": "processed",
        "began": 5.0,
        "ended": 5.0125,
        "size": 1,
        "tokens": 1,
    }
    dead = {"number": 18204, "mode": "extend", "phase": "forward_begun", "size": 10, "seconds": 0.8124}
    last = dead | {"began": 6.0, "ended": None, "tokens": 370, "requests": [request]}
    dead_steps = {"last": [done | {"requests": []}, last]}
    document["processes"][0]["steps"] = dead_steps | {"in_step": dead | {"rids": [f"r{n}" for n in range(10)]}}
    document["processes"][1]["steps"] = {"last": [], "in_step": dead | {"mode": "", "phase": "received", "rids": []}}
    text = format_summary(Incident.of(document))
    expected = """\
## Steps

- TP1 went another way. (established)
- sglang::scheduler_TP1 (pid 8) died in step 18,204: extend of 10, forward begun, for 0.812 s
- its requests: r0, r1, r2, r3, r4, r5, r6, r7 and 2 more
- its step 18,203: decode, 1 req, 1 tok, 12.5 ms
- its step 18,204: extend, 10 req, 370 tok, forward begun (ab12 and 9 more)

## Processes
"""
    assert expected in text
    assert "- in step 18,204: not yet scheduled, received, for 0.812 s" in text
    # Who was in no step, as between two requests, is said to be so.
    document["processes"][0]["steps"]["in_step"] = None
    assert "- sglang::scheduler_TP1 (pid 8) was in no step\n" in format_summary(Incident.of(document))


@pytest.mark.parametrize(
    ("environment", "lines"),
    [
        ({}, []),
        ({"versions": None, "parallel": 3, "place": [], "memory": "none"}, []),
        (
            {
                "path": "environment.json",
                "model": "llama",
                "parallel": {"tp": 8, "pp": 1, "dp": 2, "nnodes": 2, "node_rank": 1},
                "versions": {"torch": "2.9", "cuda": "12.8", "driver": "570.86", "sglang": "0.5.23"},
                "started": "2026-01-01T00:00:00.000000Z",
                "uptime_secs": 61.4,
                "memory": {"used_bytes": 1 << 30, "limit_bytes": 2 << 30, "events": {"oom_kill": 1}},
                "shared_memory": {"total_bytes": 4 << 30, "used_bytes": 0},
                "place": {"container": "0123456789abcdef", "slurm": {"job_id": "7", "node": "n1"}},
            },
            [
                "model: llama, tp 8, dp 2, nnodes 2",
                "versions: torch 2.9, cuda 12.8, driver 570.86",
                "started: 2026-01-01T00:00:00.000000Z, up 61 s",
                "memory: used 1.00 GiB, limit 2.00 GiB, shared memory used 0.00 GiB, of 4.00 GiB, OOM kills 1",
                "where: container 0123456789ab, slurm job_id 7, slurm node n1",
                "more: environment.json",
            ],
        ),
    ],
    ids=["nothing", "another form", "all"],
)
def test_what_surrounded_the_server_is_said_first(environment: dict[str, Any], lines: list[str]) -> None:
    found = surroundings(Incident.of({"environment": environment}).surroundings)
    assert [f"{label}: {text}" for label, text in found] == lines


def test_the_commands_of_a_summary_name_the_folder() -> None:
    path = Path("/crash/host")
    text = format_summary(Incident.of(DOCUMENT), path)
    assert f"next    sglang-crashkit show {path} --stacks\n" in text
    assert f"next    sglang-crashkit bundle {path} --no-prompts" in text
    assert "sglang-crashkit show '/a b' --stacks" in format_summary(Incident.of({}), Path("/a b"))


MANY = 514


def rank(number: int, **fields: Any) -> dict[str, Any]:
    pid = 1000 + number
    evidence = [
        {"kind": "stack", "status": "captured", "path": f"stacks/{pid}.txt", "source": "py-spy", "seconds": pid / 1e4},
        {"kind": "flight_recorder", "status": "skipped", "reason": f"there is no pipe /run/{pid}.pipe"},
        {"kind": "proc_state", "status": "captured"},
    ]
    process = {"pid": pid, "title": f"sglang::scheduler_TP{number}", "role": "scheduler", "evidence": evidence}
    step = {"number": 14, "mode": "decode", "size": 3, "phase": "forward_begun", "seconds": 9.5 + number / 1000}
    process |= {"doing": ["all_reduce (x.py:3)"], "steps": {"in_step": step}}
    process |= {"last_sign": {"doing": "batch 14", "seconds_before": 5.0 + number % 2}}
    return process | {"gpu": [f"kernel spin on GPU {number // 257}"]} | fields


def text_of(*processes: dict[str, Any], first: int | None = None) -> str:
    document = {"processes": list(processes), "verdict": {"first_failure": {"pid": first}}}
    text = format_summary(Incident.of(document))
    return text.partition("## Processes\n")[2].partition("\n\n## Timeline")[0]


def test_many_ranks_that_agree_are_one_section() -> None:
    ranks = [rank(number) for number in range(MANY)]
    # One of them has a log that others lack, for a reason.
    ranks[3]["evidence"].append({"kind": "log", "status": "skipped", "reason": "it logged nothing"})
    assert (
        text_of(*ranks)
        == """
### TP0-513 (514 processes): alive then
- pids: TP0 1000, TP1 1001, TP2 1002, TP3 1003, TP4 1004, TP5 1005, TP6 1006, TP7 1007 and 506 more in incident.json
- all_reduce (x.py:3)
- last sign: batch 14, 5.0 to 6.0 s before
- in step 14: decode of 3, forward begun, for 9.500 to 10.013 s
- GPU of TP0-256: kernel spin on GPU 0
- GPU of TP257-513: kernel spin on GPU 1
- stack: captured by py-spy (stacks/, 514 files, 0.100 to 0.151 s)
- flight_recorder: skipped (there is no pipe /run/N.pipe)
- proc_state: captured (in incident.json)
- log: skipped of TP3 (it logged nothing)"""
    )


def test_who_failed_first_has_the_first_section() -> None:
    detokenizer = {"pid": 7, "title": "sglang::detokenizer", "role": "detokenizer"}
    text = text_of(detokenizer, *(rank(number) for number in range(4)), first=1002)
    heads = [line for line in text.splitlines() if line.startswith("#")]
    assert heads == [
        "### sglang::scheduler_TP2 (pid 1002): alive then",
        "### TP0-1, TP3 (3 processes): alive then",
        "### sglang::detokenizer (pid 7): alive then",
    ]


@pytest.mark.parametrize(
    "other",
    [
        {"doing": ["forward (y.py:9)"]},
        {"state": {"State": "T (stopped)"}},
        {"exit": {"signal": "SIGKILL", "cause": "signal", "detail": "x"}},
        {"steps": {"in_step": {"number": 15}}},
        {"last_sign": {"doing": "batch 15"}},
        {"gpu": ["kernel gemm on GPU 1"]},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_rank_that_differs_stands_apart(other: dict[str, Any]) -> None:
    heads = [line for line in text_of(rank(0), rank(1, **other), rank(2)).splitlines() if line.startswith("#")]
    assert len(heads) == 2
    (of_others,) = [head for head in heads if head.startswith("### TP0, TP2 (2 processes)")]
    # Of a rank that is dead or stopped a reader wants to know before those that live.
    assert (of_others == heads[1]) is ("dead" in heads[0] or "stopped" in heads[0])


def test_a_group_has_no_end_of_lines() -> None:
    ranks = [rank(number, evidence=[{"kind": f"{'k' * number}", "status": "captured"}]) for number in range(99)]
    lines = text_of(*ranks).splitlines()
    assert len(lines) < 40
    assert lines[-1] == "- 75 more in incident.json"
    assert max(map(len, lines)) < 250


def event(number: int, name: str = "process_exited", **fields: Any) -> dict[str, Any]:
    time = f"2026-01-02T03:04:{number / 100:09.6f}Z"
    return {"time": time, "event": name, "pid": number, "title": f"sglang::scheduler_TP{number}"} | fields


def told(*events: dict[str, Any]) -> list[str]:
    incident = Incident.of({"server": {"pid": 7000}, "timeline": list(events)})
    return [f"{run.who}: {run.details}" for run in runs_of(incident)]


def test_many_that_are_alike_are_one_line() -> None:
    assert told(*(event(number, signal="SIGKILL") for number in range(514))) == [
        "TP0-513 (514 processes): within 5.130 s, signal SIGKILL"
    ]


@pytest.mark.parametrize(
    ("of_all", "of_one"),
    [({"code": 1}, {"code": 139}), ({"message": "expected 8 ranks, 7 came"}, {"message": "expected 8 ranks, 6 came"})],
)
def test_the_one_number_that_tells_stands_apart(of_all: dict[str, Any], of_one: dict[str, Any]) -> None:
    lines = told(*(event(number, **(of_one if number == 5 else of_all)) for number in range(20)))
    assert len(lines) == 2
    assert lines[0].startswith("TP0-4, TP6-19 (19 processes)")
    assert lines[1].startswith("TP5: ")


def test_what_is_long_is_cut() -> None:
    segments = [{"name": f"s{number}", "bytes": 4096, "why": "it is held"} for number in range(9)]
    words = details(Entry(event="x", pids=list(range(512)), segments=segments, message="m" * 300))
    assert words.startswith("pids 0, 1, 2, 3, 4, 5, 6, 7 and 504 more, 9 segments left, 37 kB: s0 (it is held), ")
    assert words.endswith(f"s7 (it is held) and 1 more, {'m' * 97}...")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("there is no pipe /run/1003.pipe", "there is no pipe /run/7.pipe"),
        ("Connection closed by peer [127.0.0.1]:31107", "Connection closed by peer [127.0.0.2]:41100"),
        ("Connection closed by peer [10.0.0.1]:2785. This", "Connection closed by peer [10.0.0.2]:941. This"),
        ("10.0.0.1:2785 refused", "10.0.0.2:941 refused"),
        ("GPU 3: 79.10 GiB, of which 640 MiB are free", "GPU 5: 79.10 GiB, of which 12 MiB are free"),
        ("[Rank 3] the watchdog waited 600012 ms", "[Rank 12] the watchdog waited 599 ms"),
        ("silent_secs 5.1, doing batch 14, of 3 requests", "silent_secs 9.25, doing batch 9, of 1 requests"),
        ("at 0x7f3a", "at 0x91"),
        ("GPU-0d1f2a3b-1111-2222-3333-444455556666", "GPU-fd1f2a3b-aaaa-2222-3333-444455556666"),
    ],
)
def test_what_differs_with_the_process_is_passed_over(one: str, other: str) -> None:
    assert without_own_numbers(one) == without_own_numbers(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("code 1, signal None", "code 139, signal None"),
        ("exit code: -9", "exit code: -11"),
        ("signal 10", "signal 12"),
        ("[Errno 13] refused", "[Errno 28] refused"),
        ("CUDA error 700", "CUDA error 719"),
        ("error: 100001", "error: 100002"),
        ("expected 8 ranks, 7 came", "expected 8 ranks, 6 came"),
        ("SeqNum=123456, OpType=ALLREDUCE", "SeqNum=123457, OpType=ALLREDUCE"),
        ("Xid 79", "Xid 48"),
    ],
)
def test_what_tells_what_happened_stays(one: str, other: str) -> None:
    assert without_own_numbers(one) != without_own_numbers(other)
