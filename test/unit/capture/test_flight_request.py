from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_crashkit.analysis.collectives import RankRecord, judge_collectives
from sglang_crashkit.capture.flight_request import (
    FlightPlace,
    FlightRequest,
    GlooRequest,
    NoRecorderError,
    Received,
    parse_answer,
)
from sglang_crashkit.kernel.stack_hooks import HookFiles
from sglang_crashkit.model.flight_dump import FlightDumpError
from unit.capture.test_responder import impostor as impostor
from unit.support import torch_recorder
from unit.support.flight_dumps import document, entry, pickled
from unit.support.targets import SLEEPER, hooked
from unit.support.waiting import LONG, descriptors, spawned, wait_until

Start = Callable[..., FlightRequest]
CONTENT = pickled(document([entry(number, number) for number in range(50)]))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a process with a recorder, and return a request for its dump."""
    stack = contextlib.ExitStack()

    def start_recorder(
        how: str = "",
        *,
        is_own: bool = True,
        stem: str = "",
    ) -> FlightRequest:
        written = tmp_path / "content"
        written.write_bytes(CONTENT)
        pipe_stem, dump_stem = str(tmp_path / f"{stem}nccl-"), str(tmp_path / f"{stem}rank")
        argv = [sys.executable, torch_recorder.__file__, pipe_stem, dump_stem, 3, written, 0.2, how]
        process = stack.enter_context(spawned(argv))
        return FlightRequest(process.pid, FlightPlace(pipe_stem, dump_stem, is_own))

    with stack:
        yield start_recorder


def receive(request: FlightRequest | GlooRequest) -> Received:
    return wait_until(request.look, "the dump is whole")


def test_an_earlier_dump_in_a_shared_folder_stays_unused(start: Start, tmp_path: Path) -> None:
    (tmp_path / "rank3").write_bytes(pickled(document([])))
    request = start(is_own=False)
    assert not request.take_unasked()
    request.send()
    assert receive(request).data == CONTENT
    assert (tmp_path / "rank3").read_bytes() == CONTENT


def test_a_dump_that_pytorch_wrote_unasked_is_taken(start: Start, tmp_path: Path) -> None:
    request = start(how="deaf")
    (tmp_path / "rank3").write_bytes(CONTENT)
    request.send()
    assert request.is_unasked
    assert receive(request).rank == 3


def test_a_dump_of_an_earlier_incident_is_ignored(start: Start, tmp_path: Path) -> None:
    request = start()
    (tmp_path / "rank3").write_bytes(pickled(document([])))
    os.utime(tmp_path / "rank3", (time.time() - 600,) * 2)
    request.send()
    assert not request.is_unasked
    assert receive(request).data == CONTENT
    # The next incident has one of its own.
    assert not (tmp_path / "rank3").exists()


def test_a_dead_processs_dump_is_found_by_its_name(tmp_path: Path) -> None:
    process = subprocess.Popen(["true"])
    process.wait(LONG)
    request = FlightRequest(process.pid, FlightPlace("", str(tmp_path / "4711-99-rank"), is_own=True))
    (tmp_path / "4711-99-rank.part").write_bytes(CONTENT)
    (tmp_path / "4711-990-rank1").write_bytes(CONTENT)
    assert not request.take_unasked()
    (tmp_path / "4711-99-rank12").write_bytes(CONTENT)
    assert request.take_unasked()
    assert receive(request).rank == 12


def test_a_process_whose_pipe_was_renamed_is_reached(start: Start, tmp_path: Path) -> None:
    first = start(is_own=False)
    second = start(is_own=False)
    first.send()
    assert receive(first).rank == 3
    # No one asked the second one, whose pipe has the name.
    os.kill(second.pid, signal.SIGSTOP)
    first.send()
    assert receive(first).rank == 3


def test_a_pipe_of_another_name_is_not_written_to(start: Start, tmp_path: Path) -> None:
    other = start(stem="other-")
    place = FlightPlace(str(tmp_path / "nccl-"), str(tmp_path / "rank"), is_own=True)
    with pytest.raises(FlightDumpError, match="there is no pipe"):
        FlightRequest(other.pid, place).send()


def test_a_link_in_place_of_the_dump_is_not_followed(start: Start, tmp_path: Path) -> None:
    request = start(how="deaf", is_own=False)
    request.send()
    (tmp_path / "secret").write_bytes(CONTENT)
    (tmp_path / "rank3").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="rank3"):
        request.look()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pipe_stem": "a", "dump_stem": "", "is_own": true}', "\x00"])
def test_a_place_that_makes_no_sense_is_none(tmp_path: Path, text: str) -> None:
    HookFiles.of(tmp_path, 1, 2).flight.write_text(text)
    assert FlightPlace.read(tmp_path, 1, 2) is None


ANSWERS = [(Path(__file__).parent / "gloo_answers" / f"rank{rank}").read_bytes() for rank in (0, 1)]
HEAD = b"1 1795300000.5\n"
DUMP = pickled(document([entry(0, 1, backend="gloo")]))


def test_of_two_real_ranks_the_one_behind_is_named() -> None:
    told = [parse_answer(answer) for answer in ANSWERS]
    records = [RankRecord(one.rank, f"rank {one.rank}", "", one.dump, told[0].seconds + 7, "gloo") for one in told]
    (first,) = judge_collectives(records)
    assert (first.kind, first.named, first.waiting, first.level) == ("behind", [1], ["rank 0"], "established")
    assert re.fullmatch(
        r"rank 1 had not begun all_reduce of 4x3 of process group tp \(gloo 1, ranks 0-1\), number 4, which rank 0 "
        r"had begun \d\.\d s before and not finished; it was begun in main \(gloo_rank.py:\d+\)\.",
        first.statement,
    )


def test_an_answer_in_pieces_is_taken_when_it_is_whole(impostor) -> None:
    open_before = descriptors()
    request = GlooRequest(os.getpid(), impostor(HEAD + DUMP))
    with contextlib.closing(request):
        request.send()
        told = receive(request)
    assert (told.rank, told.seconds, told.data) == (1, 1795300000.5, DUMP)
    wait_until(lambda: len(descriptors()) <= len(open_before) + 1, "none is left but the impostor's own")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "it had no answer"),
        (b"\xff\xfe" * 1000, r"^(\\xff\\xfe){100}$"),
        (b"-1 1.0\n" + DUMP, "^-1 1.0$"),
        (b"1" * 5000 + b" 1.0\n" + DUMP, "^1{200}$"),
        (b"1 nan\n" + DUMP, "^1 nan$"),
        (HEAD + DUMP[:-9], "cut off"),
        (HEAD + b"\x80\x02cos\nsystem\n.", "builds no plain data"),
        (HEAD + b"x" * (17 << 20), "more than 16 MiB"),
    ],
    ids=range(8),
)
def test_what_is_no_answer_is_named_within_bounds(impostor, answer: bytes, words: str) -> None:
    request = GlooRequest(os.getpid(), impostor(answer))
    request.send()
    with contextlib.closing(request), pytest.raises(FlightDumpError, match=words):
        receive(request)


def test_a_process_answers_without_pytorch(runtime: Path) -> None:
    with hooked(runtime, SLEEPER) as one:
        request = GlooRequest(one.pid, HookFiles.of(runtime, one.pid, one.start_ticks).socket)
        request.send()
        with contextlib.closing(request), pytest.raises(NoRecorderError, match=r"^it has no process group$"):
            receive(request)


def test_where_nobody_listens_it_is_said(runtime: Path) -> None:
    with pytest.raises(FlightDumpError, match="no thread of it answers: No such file or directory"):
        GlooRequest(os.getpid(), runtime / "absent.sock").send()
