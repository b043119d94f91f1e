from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sglang_crashkit.model import lenient
from sglang_crashkit.model.incident import Counts, Incident, Requests
from sglang_crashkit.view import first_screen as screen
from sglang_crashkit.view.first_screen import MAX_LINES, WIDTH
from sglang_crashkit.view.markdown import format_summary
from unit.support.stored import DATA, golden

GOLDEN = sorted(path.stem for path in DATA.glob("*.json"))


def first_screen(document: dict[str, Any], **how: Any) -> list[str]:
    return screen.first_screen(Incident.of(document), **how)


def counts_of(document: dict[str, Any]) -> Counts | None:
    return lenient.read(document, Requests).counts


@pytest.fixture
def killed() -> dict[str, Any]:
    return golden("killed")


@pytest.mark.parametrize("name", GOLDEN)
def test_the_screen_of_a_real_incident_reads_as_written_down(name: str) -> None:
    assert "\n".join(first_screen(golden(name))) + "\n" == (DATA / f"{name}.txt").read_text()


def test_an_upcoming_status_is_told_until_there_is_one(killed: dict[str, Any]) -> None:
    killed["timeline"] = [entry for entry in killed["timeline"] if entry["event"] != "server_exited"]
    assert first_screen(killed)[0] == (
        "TP1 was killed by SIGKILL: its memory cgroup counts no OOM kill; 3 requests lost"
    )
    assert first_screen(killed, ends_with=82)[0] == "TP1 was killed by SIGKILL; exit status 82; 3 requests lost"


def rank(number: int, frame: str, state: str = "S (sleeping)") -> dict[str, Any]:
    frames = ["all_reduce (torch/distributed/distributed_c10d.py:3913)", frame]
    told = {"pid": 100 + number, "title": f"sglang::scheduler_TP{number}", "role": "scheduler"}
    return told | {"state": {"State": state}, "doing": frames}


def test_ranks_that_agree_are_one_line(killed: dict[str, Any]) -> None:
    same = "all_reduce (sglang/srt/distributed/parallel_state.py:699)"
    killed["processes"] = [rank(number, same) for number in (0, *range(2, 8))]
    lines = first_screen(killed)
    assert "ranks   TP0, TP2-7: all_reduce (parallel_state.py:699)" in lines
    killed["processes"].append(rank(8, "run_batch (sglang/srt/managers/scheduler.py:7)", "T (stopped)"))
    assert "ranks   TP8: stopped (T), run_batch (scheduler.py:7)" in first_screen(killed)


def test_of_many_consequences_that_are_alike_there_is_one(killed: dict[str, Any]) -> None:
    (told,) = [entry for entry in killed["timeline"] if entry["event"] == "exception"]
    for number in range(2, 6):
        # Another port each.
        event = {"pid": 1000 + number, "title": f"sglang::scheduler_TP{number}"}
        killed["timeline"].append(told | event | {"message": told["message"].replace("]:", f"]:{number}")})
    killed["timeline"].sort(key=lambda entry: str(entry["time"]))
    (line,) = [line for line in first_screen(killed) if "TP2-5" in line]
    assert line.startswith("then    TP0, TP2-5 raised RuntimeError: Connection closed by peer")
    assert len(line) <= WIDTH


def test_health_checks_do_not_count() -> None:
    journal = {"path": "requests/requests.jsonl", "finished": 1, "unfinished": 3, "lost": 0, "left_out": 0}
    saved = {"finished": 2, "unfinished": 5, "path": "/x.pkl", "source": "pickle"}
    assert counts_of(saved | {"journal": journal}) == Counts(1, 3)
    # A journal that is not whole counts too few.
    assert counts_of(saved | {"journal": journal | {"lost": 2}}) == Counts(2, 5)
    assert counts_of(saved) == Counts(2, 5)
    assert counts_of({"finished": 1, "unfinished": 3, "source": "journal", "journal": journal}) == Counts(1, 3)
    assert counts_of({}) is None


def test_what_seen_before_and_known_upstream_is_said(killed: dict[str, Any]) -> None:
    killed["fault"] = {"count": 3, "first": "2026-11-20T04:00:00.000000Z"}
    issue = {"issue": 12345, "title": "a KV page is freed twice", "fixed_in": "0.5.24"}
    killed["cause"]["known_issues"] = [issue]
    killed["suspects"] = [{"rid": "ab12", "level": "supported", "reasons": ["it was new in the step"]}]
    killed["gpus"] = {"devices": [{"name": "NVIDIA H200"}] * 8, "xids": [{"xid": 79}]}
    text = " ".join(line.strip() for line in first_screen(killed))
    assert "up 113 s, seen 3 times since 2026-11-20" in text
    assert "known   sgl-project/sglang #12345 (fixed in 0.5.24): a KV page is freed twice" in text
    assert "suspect request ab12 (supported): it was new in the step" in text
    assert "host    8 x NVIDIA H200, Xid 79, cgroup memory" in text


APART = "sglang::scheduler_TP1 ran extend of request ab12 in step 7 where TP0 ran decode."


@pytest.mark.parametrize(("kind", "is_told"), [("mode", True), ("none", False), ("ended_earlier", False)])
def test_where_ranks_parted_is_told_of_a_death_too(killed: dict[str, Any], kind: str, is_told: bool) -> None:
    killed["divergence"] = {"kind": kind, "statement": APART}
    line = "steps   TP1 ran extend of request ab12 in step 7 where TP0 ran decode."
    assert (line in first_screen(killed)) is is_told
    killed["verdict"]["basis"] = [APART]
    assert line not in first_screen(killed)


def test_the_fullest_screen_ends_with_its_commands(killed: dict[str, Any]) -> None:
    killed["verdict"] |= {"kind": "exception", "basis": ["other words " * 20]}
    killed["divergence"] = {"kind": "mode", "statement": "words " * 40}
    killed["cause"]["known_issues"] = [{"issue": 1, "title": "words " * 40}]
    killed["suspects"] = [{"rid": "ab12", "level": "supported", "reasons": ["words " * 40]}]
    for number, message in enumerate(("one", "another", "a third")):
        told = {"time": killed["trigger"]["time"], "pid": 9000 + number, "title": f"sglang::scheduler_TP{number + 2}"}
        killed["timeline"].append(told | {"event": "exception", "message": f"RuntimeError: {message}"})
        killed["timeline"].append(told | {"event": "no_progress", "silent_secs": 5.5})
    lines = first_screen(killed, where="/crash/1")
    assert len(lines) <= MAX_LINES
    assert [line.split()[:3] for line in lines[-4:]] == [
        ["next", "sglang-crashkit", "replay"],
        ["next", "look", "at"],
        ["next", "sglang-crashkit", "show"],
        ["next", "sglang-crashkit", "bundle"],
    ]
    # What is one of several gave way, and each row that stands alone is there.
    labels = [line.split()[0] for line in lines[2:] if not line.startswith(" ")]
    assert list(dict.fromkeys(labels[:5])) == ["when", "run", "host", "first", "then"]
    assert labels[-8:-4] == ["ranks", "cause", "known", "suspect"]
    assert "steps" in labels


@pytest.mark.parametrize("level", ["supported", "established"])
def test_a_suspect_is_to_be_bisected(killed: dict[str, Any], level: str) -> None:
    command = 'next    sglang-crashkit replay /crash/1 --bisect --serve "COMMAND"'
    assert command not in first_screen(killed, where="/crash/1")
    killed["suspects"] = [{"rid": "ab12", "level": level, "reasons": ["it was alone"]}]
    lines = first_screen(killed, where="/crash/1")
    assert next(line for line in lines if line.startswith("next ")) == command
    # The cause has it, too, with the id.
    killed["cause"]["next_steps"].insert(0, '`sglang-crashkit replay 1a --bisect --serve "COMMAND"` finds the request')
    assert first_screen(killed, where="/crash/1") == lines


def test_a_control_request_is_told_in_place_of_the_step(killed: dict[str, Any]) -> None:
    for process in killed["processes"]:
        process["control"] = "update_weights_from_disk"
    text = " ".join(line[8:] for line in first_screen(killed))
    assert ", while it worked on update_weights_from_disk " in text
    assert "in step 13 (" not in text


MESSAGE = "value cannot be converted to type int32 without overflow, in the parameter top_k of a request"


def test_a_long_message_takes_a_second_line(killed: dict[str, Any]) -> None:
    killed["verdict"] |= {"kind": "exception", "basis": [f"sglang::scheduler_TP1 raised RuntimeError: {MESSAGE}."]}
    lines, short = first_screen(killed), first_screen(killed, wraps=False)
    assert len(lines) == MAX_LINES
    assert " ".join(lines[:2]) == f"TP1 raised RuntimeError: {MESSAGE}"
    assert lines[2] == "exit status 82; 3 requests lost"
    # The server's own log has its few lines for more than that.
    assert short[0].endswith("...")
    assert short[1] == lines[2]


@pytest.mark.parametrize(
    ("kills", "words"),
    [
        (1, "cgroup memory 2.0 of 5.0 GiB (at most 5.0), 1 OOM kill"),
        (2, "cgroup memory 2.0 of 5.0 GiB (at most 5.0), 2 OOM kills"),
        (0, "cgroup memory 2.0 of 5.0 GiB, no OOM kill"),
    ],
)
def test_the_kernels_counter_is_told_without_the_containers_path(
    killed: dict[str, Any], kills: int, words: str
) -> None:
    memory = {"used_bytes": 2 << 30, "peak_bytes": 5 << 30, "limit_bytes": 5 << 30, "events": {"oom_kill": kills}}
    killed["environment"]["memory"] |= memory
    counter = f"/sys/fs/cgroup/kubepods.slice/{'0123456789abcdef' * 8}.scope/memory.events"
    for process in killed["processes"]:
        if process.get("exit"):
            process["exit"] |= {"detail": f"{counter} counts 1 OOM kill(s) more than before"}
    lines = first_screen(killed)
    assert [line for line in lines if line.startswith("host") and line.endswith(f", {words}")]
    text = " ".join(line[8:] for line in lines)
    assert "SIGKILL (memory.events counts 1 OOM kill(s) more than before), in step 13 (decode of 3)" in text


def many_ranks(document: dict[str, Any]) -> None:
    """Make it an incident of 512 ranks, of which every other one does something else, and all of which raise."""
    ranks, time = document["processes"], document["trigger"]["time"]
    document["processes"] = ranks[:]
    for number in range(512):
        told = {"pid": 9000 + number, "title": f"sglang::scheduler_DP{number // 64}_PP{number // 8 % 8}_TP{number % 8}"}
        doing = [f"function_{number % 2} (sglang/srt/a_rather_long_name_of_a_module.py:{number % 2})"]
        document["processes"].append(told | {"role": "scheduler", "doing": doing})
        document["timeline"] += [
            {"time": time, "event": "exception", "message": f"RuntimeError: timeout at rank {number}"} | told,
            {"time": time, "event": "no_progress", "silent_secs": 5.5 + number} | told,
        ]


def long_words(document: dict[str, Any], word: str) -> None:
    """Put a word wherever a server, a user or a host may put one."""
    document["verdict"]["basis"] = [f"TP1 raised ValueError: {word * 900}"]
    for event in document["timeline"]:
        event |= {"message": f"ValueError: {word * 900}"} if event["event"] == "exception" else {}
    document["suspects"] = [{"rid": word * 300, "level": "supported", "reasons": [word * 300]}]
    document["environment"] |= {"model": f"/models/{word * 300}"}
    document["server"] |= {"hostname": word * 300, "sglang_version": word * 90}
    document["cause"] |= {"words": word * 300, "known_issues": [{"issue": word * 90, "title": word * 300}]}
    document["cause"]["next_steps"] = [word * 300, f"`{word} {word * 300}` does it", word * 300]
    for process in document["processes"]:
        process["doing"] = [f"{word * 99} (sglang/{word * 99}.py:3)"]


EXTREMES: dict[str, Callable[[dict[str, Any]], object]] = {
    "512 ranks": many_ranks,
    "long": lambda document: long_words(document, "x"),
    "words": lambda document: long_words(document, "some words "),
    "controls": lambda document: long_words(document, "\x1b[31m\u202e\0\n"),
    "no cause": lambda document: document.update(cause=None, suspects=None),
    "no processes": lambda document: document.update(processes=[]),
    "cut short": lambda document: [
        document.pop(name) for name in list(document) if name not in ("id", "kind", "trigger", "server", "timeline")
    ],
}


@pytest.mark.wide
@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("name", GOLDEN)
def test_the_screen_of_an_extreme_incident_keeps_its_size(name: str, extreme: str) -> None:
    document = golden(name)
    EXTREMES[extreme](document)
    for lines in (first_screen(document), first_screen(document, wraps=False)):
        assert 3 + len(lines) <= 3 + MAX_LINES == 20
        assert [line for line in lines if len(line) > WIDTH] == []
        assert [line for line in lines if not line.isprintable()] == []
        # Of each row something is told.
        assert [line for line in lines if len(line.strip()) < 3] == []
    summary = format_summary(Incident.of(document))
    assert summary.replace("\n", "").isprintable()
    assert len(summary.split("\n")) < 250 or extreme == "controls"
    assert summary.split("\n")[3 : 3 + len(first_screen(document))] == first_screen(document)


def test_many_ranks_are_told_by_the_first_and_their_number(killed: dict[str, Any]) -> None:
    many_ranks(killed)
    lines = first_screen(killed)
    assert "then    DP0_PP0_TP0-7, ... (512 in all) made no progress for 5.5 s or more" in lines
    ranks = [line for line in lines if line.startswith("ranks")]
    assert [line.partition(":")[0] for line in ranks] == [
        "ranks   DP0_PP0_TP0, ... (256 in all)",
        "ranks   DP0_PP0_TP1, ... (256 in all)",
    ]


def test_what_was_cut_short_is_said_to_be_so(killed: dict[str, Any]) -> None:
    assert killed["complete"]
    assert "not complete" not in "\n".join(first_screen(killed))
    killed["complete"] = False
    assert "up 113 s, first time, not complete" in "\n".join(first_screen(killed))
