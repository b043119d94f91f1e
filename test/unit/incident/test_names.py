from __future__ import annotations

import pytest

from sglang_crashkit.incident.names import Names, join_names, short_name, stopped_state, without_own_numbers

DOCUMENT = {
    "server": {"pid": 7},
    "processes": [
        {"pid": 8, "title": "sglang::scheduler_TP1", "role": "scheduler"},
        {"pid": 88, "title": "sglang::scheduler_TP11", "role": "scheduler"},
        {"pid": 9, "title": "python -m sglang.launch_server", "role": "server"},
    ],
}


@pytest.mark.parametrize(
    ("names", "joined"),
    [
        ([], ""),
        (["TP0"], "TP0"),
        ([f"TP{number}" for number in (7, 0, 2, 3, 4, 5, 6)], "TP0, TP2-7"),
        (["DP1_TP0", "DP0_TP0", "DP0_TP1"], "DP0_TP0-1, DP1_TP0"),
        (["detokenizer", "TP10", "TP9", "the main process"], "TP9-10, detokenizer, the main process"),
        (["TP0", "TP0"], "TP0"),
    ],
)
def test_names_in_a_row_are_one(names: list[str], joined: str) -> None:
    assert join_names(names) == joined


@pytest.mark.parametrize(
    ("title", "role", "short"),
    [
        ("sglang::scheduler_DP0_TP1", "scheduler", "DP0_TP1"),
        ("sglang::scheduler", "scheduler", "scheduler"),
        ("sglang::detokenizer", "detokenizer", "detokenizer"),
        ("python -m x", "server", "the main process"),
        ("Rank 1 scheduler", "starting", "Rank 1 scheduler"),
    ],
)
def test_what_goes_without_saying_is_left_out(title: str, role: str, short: str) -> None:
    assert short_name(title, role) == short


def test_sentences_get_short_names() -> None:
    names = Names(DOCUMENT)
    text = "python -m sglang.launch_server (pid 9) lost sglang::scheduler_TP1 (pid 8), sglang::scheduler_TP11 (pid 88)."
    assert names.in_words(text) == "the main process lost TP1, TP11."
    assert [names.short({"pid": 8}), names.short({"pid": 5, "title": "x"}), names.short({"pid": 7})] == [
        "TP1",
        "x",
        "the main process",
    ]


@pytest.mark.parametrize(
    ("process", "words"),
    [
        ({}, ""),
        ({"state": {"State": "S (sleeping)"}}, ""),
        ({"state": {"State": "T (stopped)"}}, "stopped (T)"),
        ({"state": {"State": "t (tracing stop)"}}, "stopped (t)"),
        ({"looks": [{"state": "T"}, {"state": ""}], "state": {"State": "S (sleeping)"}}, "stopped (T)"),
    ],
)
def test_who_was_stopped_is_told(process: dict[str, object], words: str) -> None:
    assert stopped_state(process) == words


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


def test_a_mark_stands_in_place_of_each_number() -> None:
    assert without_own_numbers("no pipe /run/10.4.pipe, error 5", "N") == "no pipe /run/N.N.pipe, error 5"
