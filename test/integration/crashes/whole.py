"""What an incident owes: every process that the server had, with its stack or its end, and every request."""

from __future__ import annotations

import json
import pickletools
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from integration.scenario import Member, Sent, Wreck
from sglang_crashkit.incident.exit_status import ServerExit, reports_crash
from sglang_crashkit.model.lenient import seconds_of

#: The cause of an end, and its signal.
End = tuple[str, str | None]


def assert_whole(left: Wreck, ends: Mapping[str, End] | None = None) -> None:
    """The only incident is complete, and misses no process, no stack, no end (`ends`: by title) and no request."""
    incident, ends = left.incident, ends or {}
    struck = {member.pid: ends[member.title] for member in left.members if member.title in ends}
    assert len(struck) == len(ends), left.members
    assert incident["complete"] is True
    assert_present(incident, left.members)
    # Each of SGLang's own processes has the title that it had before.
    own = {member.pid: member.title for member in left.members if member.title.startswith("sglang::") and member.lasts}
    found = {process["pid"]: process["title"] for process in incident["processes"] if process["pid"] in own}
    assert found.items() <= own.items()
    assert_told(incident, left.folder, struck)
    assert_ends(incident, struck)
    assert_requests(incident, left.folder, left.sent)


def assert_present(incident: dict[str, Any], members: Iterable[Member]) -> None:
    """Each process that the server had is in the incident."""
    there = {process["pid"]: process["title"] for process in incident["processes"]}
    assert [member for member in members if member.lasts and member.pid not in there] == [], there


def assert_told(incident: dict[str, Any], folder: Path, struck: Collection[int] = ()) -> None:
    """Each process that lived on, so none that the fault struck, has a stack or its exception."""
    main = next((process["pid"] for process in incident["processes"] if process["role"] == "server"), None)
    for process in incident["processes"]:
        captured = [piece for piece in process["evidence"] if piece["status"] == "captured"]
        for piece in captured:
            assert piece["path"] is None or (folder / piece["path"]).stat().st_size > 0, piece
        if process["pid"] not in struck and not _is_excused(process):
            is_told = {"stack", "exception"} & {piece["kind"] for piece in captured}
            assert is_told or _went_with_its_parent(process, main_is_struck=main in struck), process


def _went_with_its_parent(process: dict[str, Any], *, main_is_struck: bool) -> bool:
    if main_is_struck and process["role"] == "helper":
        # One that multiprocessing started ends by itself then.
        return process["exit"] is not None and process["exit"]["code"] == 0
    # The kernel kills it in the moment in which its parent ends; a scheduler leaves its last sign in memory.
    ended = process["exit"] is not None and process["exit"]["cause"] == "parent_ended"
    return ended and (process["role"] != "scheduler" or bool(process["last_sign"]))


def _is_excused(process: dict[str, Any]) -> bool:
    # Of what multiprocessing started, in which there is nothing of the kit, only py-spy can tell, which a busy machine
    # does not give the time.
    reasons = [piece["reason"] or "" for piece in process["evidence"] if piece["kind"] == "stack"]
    is_slow = process["role"] == "helper" and any("did not end within" in reason for reason in reasons)
    return is_slow or _comes_and_goes(process)


def _comes_and_goes(process: dict[str, Any]) -> bool:
    # A compiler has no Python stack, and ends as it likes.
    return process["role"] == "helper" and "multiprocessing." not in process["title"]


def assert_ends(incident: dict[str, Any], struck: Mapping[int, End]) -> None:
    """Whom the fault killed ended as `struck` says, by pid: cause and signal; who else is dead, in consequence."""
    ended = {process["pid"]: process for process in incident["processes"] if process["exit"] is not None}
    assert struck.keys() <= ended.keys(), ended.keys()
    for pid, process in ended.items():
        end = process["exit"]
        kinds = {piece["kind"]: piece["status"] for piece in process["evidence"]}
        assert kinds["exit"] == "captured" or _comes_and_goes(process), process
        if pid in struck:
            assert (end["cause"], end["signal"]) == struck[pid], process
        elif not _comes_and_goes(process):
            assert _is_consequence(process, end, raised=kinds.get("exception") == "captured"), process


def _is_consequence(process: dict[str, Any], end: dict[str, Any], *, raised: bool) -> bool:
    if end["cause"] == "parent_ended":
        return bool(end["signal"] == "SIGKILL")
    if end["cause"] == "exception":
        return raised
    if process["role"] in ("data_parallel_controller", "tokenizer_worker") and end["signal"] == "SIGQUIT":
        # A rank that raises sends it to the process that started it, the supervisor of tokenizer workers to each of
        # them; one that was asked nothing yet has no handler for it.
        return bool(end["cause"] == "signal")
    if process["role"] == "helper":
        return (end["cause"], end["code"]) == ("exit_status", 0)
    if process["role"] == "tokenizer_worker" and end["code"] == ServerExit.FAILED_START:
        # It is there once the server has started.
        return False
    serves = process["role"] in ("server", "tokenizer_worker")
    return serves and end["cause"] == "exit_status" and reports_crash(end["code"])


def assert_requests(incident: dict[str, Any], folder: Path, sent: Sequence[Sent]) -> None:
    """The requests in flight are those sent, in the journal, and in the server's own file where there is one."""
    requests = incident["requests"]
    if not sent:
        assert requests["reason"], requests
        return
    assert requests["unfinished"] == len(sent), requests
    assert requests["path"] or requests["source"] == "journal", requests
    saved = [entry["path"] for entry in incident["timeline"] if entry["event"] == "requests_saved"]
    assert bool(saved) == bool(requests["path"]), requests
    if saved:
        assert_saved(saved, sent)
    assert journaled(incident, folder, "unfinished") == {request.rid: request.text for request in sent}


def assert_saved(paths: Iterable[str], sent: Iterable[Sent]) -> None:
    """The files that the server saved hold these requests; they are not unpickled: their classes are SGLang's."""
    codes = [code for path in paths for code in pickletools.genops(Path(path).read_bytes())]
    texts = {argument for _code, argument, _at in codes if isinstance(argument, str)}
    wanted = {word for request in sent for word in (request.rid, request.text)}
    assert wanted - texts == set()


def journaled(incident: dict[str, Any], folder: Path, *states: str) -> dict[str, str]:
    """Return the prompts of those requests in the journal that are in one of these states, by their ids."""
    lines = (folder / incident["requests"]["journal"]["path"]).read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return {request["rid"]: request["text"] for request in found if request["state"] in states}


def times_of(incident: dict[str, Any]) -> dict[str, float]:
    """Return when each event of the timeline was first, in seconds since the epoch."""
    return {entry["event"]: seconds_of(entry["time"]) or 0.0 for entry in reversed(incident["timeline"])}
