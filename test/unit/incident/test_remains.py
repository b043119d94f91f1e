from __future__ import annotations

from pathlib import Path

import pytest

from sglang_crashkit.incident.remains import REQUESTS, journal_remains, unlisted_pieces


def write(folder: Path, name: str, text: str = "") -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text)


def test_each_kind_of_piece_is_known_by_its_name(tmp_path: Path) -> None:
    for mark in ("", ".2", ".native", ".fault"):
        for suffix in (".txt", ".json"):
            write(tmp_path, f"stacks/scheduler_TP1-8{mark}{suffix}")
    write(tmp_path, "ranks/scheduler_TP1-8.exception.json")
    write(tmp_path, "gpu/scheduler_TP1-8.kernels.json")
    assert list(unlisted_pieces(tmp_path, 8, set())) == [
        ("stack", "stacks/scheduler_TP1-8.2.txt"),
        ("fault_stack", "stacks/scheduler_TP1-8.fault.txt"),
        ("native_stack", "stacks/scheduler_TP1-8.native.txt"),
        ("stack", "stacks/scheduler_TP1-8.txt"),
        ("exception", "ranks/scheduler_TP1-8.exception.json"),
        ("gpu_kernels", "gpu/scheduler_TP1-8.kernels.json"),
    ]


def test_what_is_listed_is_not_told_again(tmp_path: Path) -> None:
    names = ("stacks/x-8.txt", "stacks/x-8.native.txt", "ranks/x-8.exception.json", "gpu/x-8.kernels.json")
    for name in (*names, "stacks/x-8.json", "stacks/x-8.native.json"):
        write(tmp_path, name)
    assert list(unlisted_pieces(tmp_path, 8, names)) == []
    # A text alone does not stand for the native one.
    assert list(unlisted_pieces(tmp_path, 8, names[:1])) == [
        ("native_stack", "stacks/x-8.native.txt"),
        ("exception", "ranks/x-8.exception.json"),
        ("gpu_kernels", "gpu/x-8.kernels.json"),
    ]


def test_of_a_json_without_its_text_the_json_is_named(tmp_path: Path) -> None:
    write(tmp_path, "stacks/x-8.native.json")
    assert list(unlisted_pieces(tmp_path, 8, set())) == [("native_stack", "stacks/x-8.native.json")]


@pytest.mark.parametrize("name", ["x-88.txt", "x-9.txt", "x-8.new.txt", "x-8.txt.1", "x8.txt", ".x-8.txt.7.new"])
def test_other_files_are_passed_over(tmp_path: Path, name: str) -> None:
    write(tmp_path, f"stacks/{name}")
    assert list(unlisted_pieces(tmp_path, 8, set())) == []


def test_requests_are_counted_by_their_state(tmp_path: Path) -> None:
    states = ("unfinished", "unfinished", "finished", "dropped")
    write(tmp_path, REQUESTS, "".join(f'{{"state": "{state}"}}\n' for state in states) + '[]\n{"state": "fin')
    told = journal_remains(tmp_path, "cut off")
    assert told is not None
    assert (told["unfinished"], told["finished"], told["torn"], told["reason"]) == (2, 1, 1, "cut off")
    assert told["path"] == REQUESTS


def test_without_the_file_of_requests_nothing_is_told(tmp_path: Path) -> None:
    assert journal_remains(tmp_path, "") is None
