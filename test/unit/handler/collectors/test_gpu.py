"""What GPUs tell in an incident, through real processes: their driver, which is made for it, and flight recorders.

Flight recorders are asked, waited for a little, compared, and never the reason for more harm.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
import re
import signal
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.incident.exit_status import ServerExit
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.procfs import is_host_namespace
from sglang_crashkit.model.flight_dump import parse_dump
from unit.support.flight_dumps import document, entry, pickled
from unit.support.nvml_driver import FIRST, GIB, SECOND, Driver
from unit.support.server_driver import HOST, Server, crash, document_of, events_of, piece_if_any
from unit.support.waiting import LONG, wait_until

Start = Callable[..., Server]
#: The word of a rank whose pid the driver does not know.
CLAIM = """
import sys, types
from sglang_crashkit.srt.managers import scheduler_heartbeat
properties = types.SimpleNamespace(uuid="00000001-aaaa")
cuda = types.SimpleNamespace(
    is_initialized=lambda: True, current_device=lambda: 0, get_device_properties=lambda _: properties
)
sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
"""


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path)


def watcher_of(server: Server) -> int:
    """Return the pid of the child that waits for Xid events."""

    def found() -> int | None:
        children = Path(f"/proc/{server.handler.pid}/task/{server.handler.pid}/children").read_text().split()
        return next(
            (int(pid) for pid in children if "gpu_facts_child" in " ".join(procfs.read_cmdline(int(pid)))), None
        )

    return wait_until(found, "the handler has a watcher")


def unread(watcher: int) -> int:
    """Return how many bytes of what it said the handler has not read."""
    pipe = os.open(f"/proc/{watcher}/fd/1", os.O_RDONLY | os.O_NONBLOCK)
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    os.close(pipe)
    return count[0]


def facts_of(told: dict[str, Any]) -> dict[str, Any]:
    (root,) = [process for process in told["processes"] if process["role"] == "server"]
    (piece,) = [piece for piece in root["evidence"] if piece["kind"] == "gpu_facts"]
    return piece | {"file": piece["path"] and json.loads(Path(told["folder"], piece["path"]).read_text())}


def strike(server: Server, driver: Driver, folder: Path) -> int:
    """Have the second rank say which GPU it has, which then fails; return the pid of the handler's watcher."""
    watcher = watcher_of(server)
    claim = folder / "claim.py"
    claim.write_text(CLAIM)
    server.say(f"tell scheduler_TP1 run {claim}")
    assert server.ask("tell scheduler_TP1 beat") == "beating"
    start = wait_until(lambda: unread(watcher), "the counters are read")
    driver.raise_xid(1, 79)
    wait_until(lambda: unread(watcher) > start, "the event is told")
    return watcher


@pytest.mark.story
def test_an_incident_has_what_became_of_the_gpus(start_server: Start, driver: Driver, tmp_path: Path) -> None:
    driver.say(replay=7)
    server = start_server(environ=driver.environ)
    watcher = strike(server, driver, tmp_path)
    driver.say(replay=19, pids=f"0 {server.ranks['scheduler_TP0']} {119 * GIB}")
    told = crash(server)
    gpus, level = told["gpus"], "established" if is_host_namespace() else "supported"
    first = gpus["devices"][0]
    assert first["processes"] == [
        {
            "pid": server.ranks["scheduler_TP0"],
            "title": "sglang::scheduler_TP0",
            "used": 119 * GIB,
            "level": level,
        }
    ]
    assert first["new_errors"] == {"nvlink 0 replay": 12}
    (event,) = gpus["xids"]
    dead = server.ranks["scheduler_TP1"]
    assert (event["xid"], event["bus_id"], event["source"]) == (79, SECOND, "NVML")
    assert [(one["pid"], one["level"]) for one in event["processes"]] == [(dead, "supported")]
    (noted,) = [entry for entry in told["timeline"] if entry["event"] == "xid"]
    assert (noted["number"], noted["gpu"], noted["pids"]) == (79, SECOND, [dead])
    facts = facts_of(told)
    assert (facts["status"], facts["path"], facts["reason"]) == ("captured", "gpu/facts.json", None)
    assert [gpu["temperature"] for gpu in facts["file"]["gpus"]] == [65, 65]
    assert [gpu["bus_id"] for gpu in facts["file"]["start"]["gpus"]] == [FIRST, SECOND]
    summary = Path(told["folder"], "summary.md").read_text()
    assert (
        "\n## GPUs\n\n- GPU 0 NVIDIA H200 (0000:1a:00): 120.0 GiB of 140.0 GiB used; 119.0 GiB by sglang::" in summary
    )
    assert "\n- Xid 79 at " in summary
    with pytest.raises(ProcessLookupError):
        os.kill(watcher, 0)


@pytest.mark.parametrize("from_the_start", [True, False])
def test_a_hanging_driver_costs_neither_incident_nor_earlier_facts(
    start_server: Start, driver: Driver, tmp_path: Path, from_the_start: bool
) -> None:
    driver.say(mode="hang_all" if from_the_start else "")
    server = start_server(environ=driver.environ | {"SGLANG_CRASHKIT_BUDGET_SECS": "4"})
    if not from_the_start:
        strike(server, driver, tmp_path)
        driver.say(mode="hang_all")
    told = crash(server)
    assert told["complete"]
    assert facts_of(told)["status"] == "failed"
    first, *others, last = told["gpus"]["lines"]
    assert first.startswith("the driver did not answer, before it said anything: ")
    if from_the_start:
        assert not others
        assert "no NVML events: the driver has not answered since the server started" in last
    else:
        dead = server.ranks["scheduler_TP1"]
        assert others[0] == f"GPU 1 NVIDIA H200 ({SECOND}): sglang::scheduler_TP1 (pid {dead}, supported)"
        assert [one["pid"] for one in told["gpus"]["xids"][0]["processes"]] == [dead]


@pytest.mark.parametrize("environ", [{}, {"SGLANG_CRASHKIT_GPU_FACTS": "0"}])
def test_without_a_gpu_or_switched_off_nobody_is_asked(
    start_server: Start, driver: Driver, environ: dict[str, str]
) -> None:
    if not environ and Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    server = start_server(environ=(driver.environ if environ else {}) | environ)
    told = crash(server)
    assert told["gpus"] is None
    piece = facts_of(told)
    assert piece["status"] == "skipped"
    assert piece["reason"].startswith("switched off by SGLANG_CRASHKIT_GPU_FACTS" if environ else "no GPU: ")
    assert "## GPUs" not in Path(told["folder"], "summary.md").read_text()


WAITING = document([*[entry(number, number + 1) for number in range(9)], entry(9, 10, state="scheduled")])
BEHIND = document([entry(number, number + 1) for number in range(9)])


@pytest.fixture
def start_recording(start_server: Start, tmp_path: Path) -> Start:
    """Start a stand-in server in the environment that ``--crash-dump-folder`` makes."""
    environ = {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "SGLANG_CRASHKIT_FLIGHT_FOLDER": str(tmp_path / "crash" / HOST / "flight_recorder"),
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    }
    return lambda **more: start_server(environ=environ | more)


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., None]:
    """Have a rank of a server record such a dump."""

    def give(server: Server, rank: int, content: bytes, seconds: float = 0.2, how: str = "") -> None:
        path = tmp_path / f"content{rank}"
        path.write_bytes(content)
        assert server.ask(f"tell scheduler_TP{rank} nccl {rank} {path} {seconds} {how}") == "listening"

    return give


Record = Callable[..., None]
_PYTORCH = """
import sys, time
from types import SimpleNamespace
world = SimpleNamespace(pg_names={{SimpleNamespace: "0"}}, pg_group_ranks={{SimpleNamespace: [0, 1]}})
sys.modules["torch.distributed.distributed_c10d"] = SimpleNamespace(
    _world=world, is_initialized=lambda: True, get_rank=lambda: {rank}
)
sys.modules["torch._C._distributed_c10d"] = SimpleNamespace(
    _dump_fr_trace=lambda *_: (time.sleep({seconds}), {content!r})[1]
)
"""
PATIENT = "from sglang_crashkit.srt import exception_record; exception_record.CAPTURE_WAIT_SECS = 60.0"


def record_gloo(server: Server, tmp_path: Path, rank: int, content: dict[str, Any], seconds: float = 0.0) -> None:
    """Have a rank of a server keep such a record of what it does over gloo, tell it in so many seconds, and beat."""
    path = tmp_path / f"pytorch{rank}.py"
    path.write_text(_PYTORCH.format(rank=rank, content=pickled(content), seconds=seconds))
    server.say(f"tell scheduler_TP{rank} run {path}")
    assert server.ask(f"tell scheduler_TP{rank} beat") == "beating"


def piece_of(told: dict[str, Any], title: str, kind: str = "flight_recorder") -> dict[str, Any]:
    return piece_if_any(told, title, kind)


@pytest.mark.story
def test_the_dump_of_the_survivor_is_kept_and_nothing_else(
    start_recording: Start, record: Record, tmp_path: Path
) -> None:
    server = start_recording()
    record(server, 0, pickled(WAITING))
    record(server, 1, pickled(WAITING))
    told = crash(server, status=ServerExit.KILLED)
    piece = piece_of(told, "scheduler_TP0")
    assert (piece["status"], piece["path"], piece["reason"]) == ("captured", "gpu/flight_recorder_0", None)
    assert (told["folder"] / piece["path"]).read_bytes() == pickled(WAITING)
    assert (told["folder"] / piece["path"]).stat().st_mode & 0o077 == 0
    dead = f"sglang::scheduler_TP1 (pid {server.ranks['scheduler_TP1']}): it was dead before it could be asked."
    assert told["collectives"] == {"findings": [], "missing": [dead]}
    assert told["verdict"]["first_failure"]["title"] == "sglang::scheduler_TP1"
    events = events_of(told)
    assert events.index("stacks_captured") < events.index("flight_recorders_asked") < events.index("incident_finished")
    assert piece_of(told, "scheduler_TP1") == {}
    wait_until(lambda: not server.runtime.exists(), "the handler cleans up")
    assert list((tmp_path / "crash" / HOST / "flight_recorder").glob("*")) == []


@pytest.mark.parametrize("kind", ["flight_recorder", "gloo_flight_recorder"])
def test_a_hang_names_the_rank_that_is_behind(
    start_recording: Start, record: Record, tmp_path: Path, kind: str
) -> None:
    server = start_recording(SGLANG_CRASHKIT_HANG_SECS="2")
    for rank, content in ((0, WAITING), (1, BEHIND)):
        if kind == "flight_recorder":
            record(server, rank, pickled(content))
            assert server.ask(f"tell scheduler_TP{rank} beat") == "beating"
        else:
            record_gloo(server, tmp_path, rank, content)
    for rank in (0, 1):
        assert server.ask(f"tell scheduler_TP{rank} hush") == "silent"
    stored = server.incident()
    told = stored.document | {"folder": stored.path}
    (finding,) = told["collectives"]["findings"]
    ahead, behind = server.ranks["scheduler_TP0"], server.ranks["scheduler_TP1"]
    assert (finding["kind"], finding["level"]) == ("behind", "established")
    assert (finding["pids"], finding["waiting_pids"]) == ([behind], [ahead])
    # Of the other recorder, which no one has, nothing is said to be missing.
    assert told["collectives"]["missing"] == []
    assert (told["verdict"]["first_failure"]["pid"], told["verdict"]["level"]) == (behind, "supported")
    assert finding["statement"] in told["verdict"]["text"]
    assert "had not begun all_reduce of 4x3 of process group 0" in told["verdict"]["text"]
    assert sorted(path.name for path in (told["folder"] / "gpu").iterdir()) == [f"{kind}_0", f"{kind}_1"]
    for rank, content in ((0, WAITING), (1, BEHIND)):
        piece = piece_of(told, f"scheduler_TP{rank}", kind)
        assert (piece["status"], piece["path"]) == ("captured", f"gpu/{kind}_{rank}")
        dump = parse_dump((told["folder"] / piece["path"]).read_bytes())
        assert len(dump.entries) == len(content["entries"])
    assert server.process.poll() is None


def test_a_rank_holding_the_gil_says_why_gloo_is_missing(start_recording: Start) -> None:
    server = start_recording()
    server.say("tell scheduler_TP0 hold_the_lock")
    told = crash(server, status=ServerExit.KILLED)
    piece = piece_of(told, "scheduler_TP0", "gloo_flight_recorder")
    reason = "not whole within 2.0 s: no answer, the GIL is not to be had"
    assert (piece["status"], piece["reason"]) == ("failed", reason)
    assert any(line.endswith(f"gloo: {reason}.") for line in told["collectives"]["missing"])


def test_the_budget_of_the_incident_holds(start_recording: Start, record: Record) -> None:
    server = start_recording(SGLANG_CRASHKIT_BUDGET_SECS="2")
    record(server, 0, pickled(WAITING), how="deaf")
    server.kill("scheduler_TP1")
    # On a busy machine the server's end does not wait for so short an incident.
    server.process.wait(2 * LONG)
    piece = piece_of(document_of(server), "scheduler_TP0")
    assert piece["status"] == "failed"
    within = re.match(r"not whole within (.*) s: no file appeared", piece["reason"])
    assert within is not None, piece
    assert float(within[1]) <= 2.0


@pytest.mark.parametrize(
    ("content", "how", "reason"),
    [
        (b"\x80\x02cos\nsystem\n.", "", ".*builds no plain data"),
        (pickled(WAITING), "half", r"not whole within 3\.5 s: \S+0 has \d+ bytes$"),
        (pickled(WAITING), "hang", r"not whole within 3\.5 s: \S+0 has \d+ bytes$"),
        (pickled(WAITING), "die", r"it ended before its dump was whole: \S+0 has \d+ bytes$"),
    ],
)
def test_a_bad_dump_is_a_failed_piece_and_no_more(
    start_recording: Start, record: Record, content: bytes, how: str, reason: str
) -> None:
    server = start_recording()
    record(server, 0, content, how=how)
    told = crash(server, status=ServerExit.KILLED)
    piece = piece_of(told, "scheduler_TP0")
    assert piece["status"] == "failed"
    assert re.match(reason, piece["reason"]), piece
    assert told["complete"]
    assert told["verdict"]["first_failure"]["title"] == "sglang::scheduler_TP1"


def test_a_stopped_rank_is_not_asked(start_recording: Start, record: Record) -> None:
    server = start_recording()
    record(server, 0, pickled(WAITING))
    server.kill("scheduler_TP0", signal.SIGSTOP)
    piece = piece_of(crash(server, status=ServerExit.KILLED), "scheduler_TP0")
    assert (piece["status"], piece["reason"]) == ("skipped", "it is stopped and reads no pipe")


def test_what_pytorch_wrote_before_it_ended_a_rank_is_taken(
    start_recording: Start, record: Record, tmp_path: Path
) -> None:
    server = start_recording()
    record(server, 0, pickled(BEHIND))
    pid = server.ranks["scheduler_TP1"]
    (told_at,) = server.runtime.glob(f"{pid}-*.flight")
    Path(f"{json.loads(told_at.read_text())['dump_stem']}1").write_bytes(pickled(WAITING))
    told = crash(server, status=ServerExit.KILLED)
    piece = piece_of(told, "scheduler_TP1")
    assert (piece["status"], piece["path"]) == ("captured", "gpu/flight_recorder_1")
    assert piece["reason"] == "PyTorch had written it by itself"
    finding = told["collectives"]["findings"][0]
    assert (finding["kind"], finding["pids"]) == ("behind", [server.ranks["scheduler_TP0"]])
    assert told["verdict"]["first_failure"]["title"] == "sglang::scheduler_TP1"
    assert finding["statement"] in told["verdict"]["text"]


def test_a_rank_that_raised_answers_for_gloo_before_it_ends(start_recording: Start, tmp_path: Path) -> None:
    server = start_recording()
    record_gloo(server, tmp_path, 1, WAITING, seconds=0.3)
    # A busy machine captures the others in more than the two seconds that a rank waits.
    (tmp_path / "patient.py").write_text(PATIENT)
    server.say(f"tell scheduler_TP1 run {tmp_path / 'patient.py'}")
    server.say("tell scheduler_TP1 raise boom")
    server.say("tell scheduler_TP1 exit 0")
    assert server.process.wait(2 * LONG) == ServerExit.RAISED
    piece = piece_of(document_of(server), "scheduler_TP1", "gloo_flight_recorder")
    assert (piece["status"], piece["reason"]) == ("captured", None)
