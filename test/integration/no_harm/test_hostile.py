"""A real two-rank server in hostile surroundings: strangers on its socket, ranks asleep in the kernel or traced.

One server goes through it all, and ends by a hang with a py-spy that never returns. Its crash folder is one that
somebody else has prepared, and its umask takes nothing away.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from integration.faults import DETOKENIZER, STACKS_SIGNAL, write_site
from integration.faults import TP0 as FIRST
from integration.faults import TP1 as SECOND
from integration.hangs.hang_story import have_answered
from integration.hangs.stuck_rank import StuckRank
from integration.scenario import Wreck, answers_of, handler_pid, serving, shared_memory_of, wreck
from lanelib.servers import Server, opener
from sglang_crashkit.capture.pyspy import find_pyspy
from sglang_crashkit.incident.exit_status import ServerExit
from sglang_crashkit.incident.store import StoredIncident, find_incidents
from sglang_crashkit.kernel import procfs
from sglang_crashkit.model.lenient import seconds_of
from sglang_crashkit.settings import runtime_folder, socket_of
from unit.support.server_driver import piece_of
from unit.support.targets import make_tool, state_of, traced
from unit.support.waiting import child, descriptors, wait_until

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(900)]

HOST = "hostile-host"
NOBODY = 65534
#: A loaded machine takes over 20 s for a server's first batch, which is no hang. It makes the end a long one.
HANG_SECS = 60
#: What anybody does on a loaded machine, in seconds.
LONG = 120.0
#: A health check that waits for no one is answered within this time on a loaded machine, in seconds.
ANSWER_S = 1.0


@dataclass
class Story:
    """What happened to one server, in order."""

    theirs: Path  # the folder of somebody else's that the crash folder has a link to
    fallback: Path  # where its incidents went instead
    log: str = ""  # the file of its output
    answers: list[list[list[int]]] = field(default_factory=list)  # what it answered before, and after the flood
    after_flood: list[StoredIncident] = field(default_factory=list)  # incidents after the flood
    #: the incident of the rank that slept in the kernel, while the server went on
    observed: dict[str, Any] = field(default_factory=dict)
    observed_folder: Path = Path()
    tracers: list[int | None] = field(default_factory=list)  # who traced the detokenizer before and after its capture
    slept: str = ""  # state of the rank when it had been captured
    #: each health check meanwhile: when it was asked and answered, and the status
    health: list[tuple[float, float, int]] = field(default_factory=list)
    late_answer: list[int] = field(default_factory=list)  # what the request that waited for the rank was answered
    open_files: set[str] = field(default_factory=set)  # what the crash handler had open
    shared_memory: set[str] = field(default_factory=set)  # what the server had in /dev/shm before it ended
    end: Wreck = field(init=False)  # what was left in the end, but for the incident of the rank that slept
    decoy: tuple[int, bool] = (0, False)  # its pid, and whether it lived when all was over


@pytest.fixture(scope="module")
def story(release: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder, site = tmp_path_factory.mktemp("crash"), tmp_path_factory.mktemp("site")
    # The socket is in it, whose path may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ck-") as short:
        yield tell(release, folder, Path(short), site)


def tell(release: str, folder: Path, temporary: Path, site: Path) -> Story:
    """Run a server of a release through all of it."""
    stuck = StuckRank(site)
    told = Story(folder / "theirs", temporary / f"sglang-crashkit-{os.geteuid()}")
    told.theirs.mkdir()
    (folder / "crash").mkdir()
    (folder / "crash" / HOST).symlink_to(told.theirs)
    env = write_site(site) | {
        "TMPDIR": str(temporary),
        "HOSTNAME": HOST,
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        # The end is to come of upstream's own watchdog.
        "SGLANG_CRASHKIT_HANG_SECS": "0",
        "SGLANG_CRASHKIT_PYSPY": make_tool(site, f'[ -e {site}/hang ] && exec sleep 600\nexec {find_pyspy()} "$@"'),
    }
    how: dict[str, Any] = {"tp": 2, "env": env, "prefix": ("sh", "-c", 'umask 0; exec "$@"', "sh")}
    with (
        child("ready()\nwhile True: pause()", title=SECOND) as decoy,
        serving(release, folder / "crash", "--watchdog-timeout", str(HANG_SECS), **how) as server,
    ):
        told.answers.append(answers_of(server))
        told.open_files = set(descriptors(handler_pid(server)).values())
        told.log = str(server.log_path.resolve())
        flood(server, temporary)
        told.answers.append(answers_of(server))
        told.after_flood = find_incidents(told.fallback)
        sleep_and_be_traced(server, stuck, told)
        told.answers.append(answers_of(server))
        (site / "hang").touch()
        told.shared_memory = shared_memory_of(server)
        told.end = wreck(server, told.fallback, lambda s: os.kill(s.pid_of(SECOND), signal.SIGSTOP))
        told.end.incidents[:] = [found for found in told.end.incidents if found[0] != told.observed_folder]
        told.decoy = decoy.pid, decoy.poll() is None
    return told


def flood(server: Server, temporary: Path) -> None:
    """Send the crash handler what is no event of the server: as its user, and, where that can be, as another one."""
    path = str(temporary / socket_of(server.pid).relative_to(runtime_folder(0, 0).parents[2]))
    teardown = json.dumps({"event": "teardown", "pid": server.pid}).encode()
    rubbish = [b"", b"\x80rubbish" * 1000, b"[" * 50_000, json.dumps({"event": "exception"}).encode()]
    for words, user in ((rubbish, os.geteuid()), ([teardown], NOBODY)):
        if user == os.geteuid() or os.geteuid() == 0:
            pid = os.fork()
            if pid == 0:
                with contextlib.suppress(BaseException), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                    # Connected by one who may, and used by one who may not: what counts is who sends.
                    sender.connect(path)
                    os.setuid(user)
                    sender.settimeout(LONG)
                    for number in range(2000):
                        sender.send(words[number % len(words)])
                    os._exit(0)
                os._exit(1)
            assert os.waitpid(pid, 0)[1] == 0


def sleep_and_be_traced(server: Server, stuck: StuckRank, told: Story) -> None:
    """Have a rank sleep in the kernel in the middle of a request, with the detokenizer traced, until it was noticed."""
    rank, detokenizer = server.pid_of(FIRST), server.pid_of(DETOKENIZER)
    over = threading.Event()
    checking = threading.Thread(target=check_health, args=(server, told.health, over))
    with traced(detokenizer):
        told.tracers.append(procfs.read_tracer(detokenizer))
        answer = have_answered(server, 400)
        checking.start()
        stuck.stick(rank, "sleep_in_kernel")
        try:
            wait_until(lambda: state_of(rank) == "D", "the rank sleeps", LONG)
            os.kill(server.pid, STACKS_SIGNAL)
            wait_until(lambda: list(told.fallback.glob("*/incidents/*/stacks/scheduler_TP0*")), "a stack", LONG)
            told.slept = state_of(rank)
            told.tracers.append(procfs.read_tracer(detokenizer))
        finally:
            stuck.release(rank, "sleep_in_kernel")
    told.late_answer = answer()
    wait_until(lambda: all(one.finished for one in find_incidents(told.fallback)), "it is finished", LONG)
    over.set()
    checking.join(LONG)
    (only,) = find_incidents(told.fallback)
    assert only.document is not None
    told.observed, told.observed_folder = only.document, only.path


def check_health(server: Server, health: list[tuple[float, float, int]], over: threading.Event) -> None:
    while not over.wait(0.02):
        begun = time.time()
        with opener.open(f"{server.url}/health", timeout=LONG) as answer:
            health.append((begun, time.time(), answer.status))


def evidence_of(document: dict[str, Any], title: str, kind: str) -> dict[str, Any]:
    # The child of the one that sleeps shares its memory, and with that its title.
    (process,) = [one for one in document["processes"] if one["title"] == title and one["role"] != "helper"]
    return piece_of(process, kind)


def test_a_flood_on_the_handlers_socket_changes_nothing(story: Story) -> None:
    assert story.after_flood == []
    assert story.answers[0] == story.answers[1] == story.answers[2]


def test_a_rank_asleep_in_the_kernel_is_captured_asleep(story: Story) -> None:
    assert story.observed["kind"] == "snapshot"
    piece = evidence_of(story.observed, FIRST, "stack")
    assert (piece["status"], piece["source"]) == ("captured", "py-spy"), piece
    assert "sleep_in_kernel" in (story.observed_folder / piece["path"]).read_text()
    assert story.slept == "D"
    # It went on when it was let, and the server with it.
    assert len(story.late_answer) == 400


def test_a_process_that_is_traced_is_captured_beside_its_tracer(story: Story) -> None:
    piece = evidence_of(story.observed, DETOKENIZER, "stack")
    assert (piece["status"], piece["source"]) == ("captured", "py-spy"), piece
    assert story.tracers[0] is not None
    assert story.tracers[0] == story.tracers[1]


def test_the_server_answers_while_it_is_captured(story: Story) -> None:
    times = {entry["event"]: seconds_of(entry["time"]) for entry in story.observed["timeline"]}
    begun, ended = seconds_of(story.observed["trigger"]["time"]), times["incident_finished"]
    assert {status for _asked, _answered, status in story.health} == {200}
    meanwhile = [answered - asked for asked, answered, _status in story.health if begun < answered and asked < ended]
    assert len(meanwhile) >= 3
    assert max(meanwhile) < ANSWER_S


def test_a_hang_ends_the_server_although_py_spy_never_returns(story: Story) -> None:
    assert story.end.status == ServerExit.HUNG
    assert story.end.left == []
    assert story.end.incident["kind"] == "hang"
    assert story.end.incident["complete"] is True
    assert story.end.incident["requests"]["unfinished"] == 3
    free, stopped = (story.end.evidence(title, "stack") for title in (FIRST, SECOND))
    assert free["status"] == "captured"
    assert free["source"] in ("in-process", "faulthandler")
    assert free["reason"].startswith("py-spy did not end within")
    # Of a stopped one nothing but py-spy can tell.
    assert stopped["status"] == "failed"
    assert "stopped" in stopped["reason"]


def test_shared_memory_that_the_server_leaves_is_removed_or_reported(story: Story) -> None:
    assert story.shared_memory
    told = [entry for entry in story.end.incident["timeline"] if entry["event"] == "shared_memory_left"]
    left = {segment["name"] for entry in told for segment in entry["segments"]}
    assert {name for name in story.shared_memory if (Path("/dev/shm") / name).exists()} <= left


def test_a_decoy_with_a_ranks_title_is_left_alone(story: Story) -> None:
    pid, lives = story.decoy
    assert lives
    for document in (story.observed, story.end.incident):
        assert pid not in {process["pid"] for process in document["processes"]}


def test_the_handler_holds_none_of_the_servers_output_open(story: Story) -> None:
    assert story.open_files
    assert story.log not in story.open_files


def test_a_link_in_a_shared_crash_folder_is_not_followed(story: Story) -> None:
    assert list(story.theirs.iterdir()) == []
    assert Path(story.end.incident["requests"]["path"]).is_relative_to(story.fallback)


def test_all_of_it_is_private_whatever_the_umask(story: Story) -> None:
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in [story.fallback, *story.fallback.rglob("*")]}
    assert {str(path): oct(mode) for path, mode in modes.items() if path.is_dir() and mode != 0o700} == {}
    assert {str(path): oct(mode) for path, mode in modes.items() if path.is_file() and mode != 0o600} == {}
