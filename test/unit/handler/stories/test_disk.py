"""The crash handler with a crash folder that does not take what it writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unit.support.server_driver import HOST, Server, Start
from unit.support.small_disk import fill, mounted
from unit.support.waiting import LONG


@pytest.mark.story
def test_a_crash_folder_that_cannot_be_written_to_is_replaced(start_server: Start, tmp_path: Path) -> None:
    (tmp_path / "crash").write_text("")
    server = start_server(crash_folder=tmp_path / "crash")
    end(server)
    assert (tmp_path / "crash").read_text() == ""
    stored = server.incident(server.fallback)
    assert stored.document["complete"] is True
    assert stored.document["requests"]["path"] == str(server.fallback / HOST / "crash_dump.pkl")


def end(server: Server) -> None:
    server.kill("scheduler_TP1")
    server.process.wait(LONG)
    server.wait_for_handler()


def test_a_full_disk_has_who_died_of_what(start_server: Start, tmp_path: Path) -> None:
    with mounted(tmp_path / "crash", "size=2m,mode=700") as folder:
        limits = {"SGLANG_CRASHKIT_KEEP_FREE_MB": "0", "SGLANG_CRASHKIT_MAX_USE_MB": "100"}
        server = start_server(crash_folder=folder, environ=limits)
        for number in range(2, 10):
            server.ask(f"start sglang::scheduler_TP{number}")
        server.settle()
        # What is free when an incident is opened is its reserve.
        fill(folder)
        (filling,) = folder.glob("filling-*")
        os.truncate(filling, filling.stat().st_size - 128 * 1024)
        server.kill("scheduler_TP1")
        stored = server.wait_for_the_end()
        document = stored.document
        assert stored.finished
        assert document["verdict"]["first_failure"]["title"] == "sglang::scheduler_TP1"
        assert document["verdict"]["level"] == "established"
        living = [process for process in document["processes"] if process["exit"] is None]
        assert len(living) == 11
        assert all(process["doing"] for process in living)
        stacks = [piece for process in living for piece in process["evidence"] if piece["kind"] == "stack"]
        assert "failed" not in {piece["status"] for piece in stacks}
        reasons = {piece["reason"].split(": ")[-1] for piece in stacks if piece["status"] == "skipped"}
        assert reasons == {"the disk is full"}


@pytest.mark.parametrize("use_up", ["inodes", "blocks"])
def test_on_a_disk_without_any_room_the_incident_goes_elsewhere(
    start_server: Start, tmp_path: Path, use_up: str
) -> None:
    with mounted(tmp_path / "crash", "size=2m,mode=700,nr_inodes=64") as folder:
        server = start_server(crash_folder=folder)
        (use_up_inodes if use_up == "inodes" else fill)(folder)
        end(server)
        assert server.incidents() == []
    stored = server.incident(server.fallback)
    assert stored.document["verdict"]["first_failure"]["title"] == "sglang::scheduler_TP1"


def use_up_inodes(folder: Path) -> None:
    for number in range(64):
        try:
            (folder / str(number)).touch()
        except OSError:
            return
