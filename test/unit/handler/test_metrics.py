from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from sglang_crashkit.handler import metrics
from sglang_crashkit.handler.metrics import (
    FILE,
    SHARED,
    Metric,
    MetricsPublisher,
    format_text,
    look_at_disk,
    problem_of_shared,
    shared_files,
)
from sglang_crashkit.memory.heartbeat import Heartbeat
from sglang_crashkit.settings import DiskLimits
from unit.support.server_driver import Server
from unit.support.stored import make_incident
from unit.support.waiting import LONG, wait_until

Make = Callable[..., MetricsPublisher]
Values = dict[str, dict[tuple[tuple[str, str], ...], float]]


def values_of(families: Any) -> Values:
    found: Values = {}
    for family in families:
        for sample in family.samples:
            labels = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "port"))
            found.setdefault(sample.name.removeprefix("sglang_crashkit_"), {})[labels] = sample.value
    return found


def read(path: Path) -> Values:
    return values_of(text_string_to_metric_families(path.read_text()))


def beat(at: float, batch_at: float) -> Heartbeat:
    return Heartbeat(at, batch_at, 3, 1, paused=False, is_busy=False, is_off=False)


@pytest.fixture
def incidents(tmp_path: Path) -> Path:
    (tmp_path / "incidents").mkdir()
    make_incident(tmp_path / "incidents", cause={"class": "host_oom"})
    make_incident(tmp_path / "incidents", kind="hang", seconds=1_800_000_000.0, cause=None)
    make_incident(tmp_path / "incidents", publish=False)
    return tmp_path / "incidents"


@pytest.fixture
def publisher(incidents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make a publisher of a server with two ranks, the second of which is dead, that publishes when it is asked to."""
    monkeypatch.setattr(metrics, "_FIRST_SECS", 0.0)
    monkeypatch.setattr(metrics, "INTERVAL_SECS", 0.0)
    made: list[MetricsPublisher] = []
    now = time.monotonic()
    ranks = {
        7: SimpleNamespace(title="sglang::scheduler_DP0_TP1", exited_at=None),
        8: SimpleNamespace(title="sglang::scheduler_TP2", exited_at=1.0),
    }
    signs = {7: beat(now - 5, now - 60), 8: beat(now, now)}

    def make(arguments: dict[str, Any], **environ: str) -> MetricsPublisher:
        received = SimpleNamespace(
            environment=SimpleNamespace(arguments=lambda: arguments),
            heartbeats=SimpleNamespace(last_signs=lambda: signs),
            journal_bytes=lambda: 0,
        )
        for name in (FILE, SHARED):
            monkeypatch.setenv(name, environ.get(name, ""))
        made.append(MetricsPublisher(ranks, SimpleNamespace(received=received), incidents, DiskLimits(max_use=1 << 30)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def publish(publisher: MetricsPublisher) -> None:
    publisher.act_on_time()
    assert publisher._reap(LONG)


def test_the_file_has_what_is_known(publisher: Make, tmp_path: Path) -> None:
    path = tmp_path / "kit.prom"
    made = publisher({"port": 30001}, **{FILE: str(path)})
    publish(made)
    found = read(path)
    assert found["handler_up"] == {(): 1.0}
    assert found["incidents"] == {
        (("cause", "host_oom"), ("kind", "killed")): 1,
        (("cause", "unknown"), ("kind", "hang")): 1,
    }
    assert found["last_incident_timestamp_seconds"] == {(): 1_800_000_000.0}
    assert found["disk_limit_bytes"] == {(): float(1 << 30)}
    assert found["disk_bytes"][()] > 1000
    ((rank, at),) = found["rank_last_step_timestamp_seconds"].items()
    assert rank == (("rank", "DP0_TP1"),)
    assert 59 < time.time() - at < 60 + LONG
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert 'port="30001"' in path.read_text()
    assert not list(tmp_path.glob(".kit*"))


def test_the_last_file_says_that_the_handler_is_gone(publisher: Make, tmp_path: Path) -> None:
    made = publisher({"port": 1}, **{FILE: str(tmp_path)})
    publish(made)
    made.close()
    found = read(tmp_path / "sglang_crashkit_1.prom")
    assert found["handler_up"] == {(): 0.0}
    assert "rank_last_step_timestamp_seconds" not in found
    assert sum(found["incidents"].values()) == 2


def test_sglangs_own_metrics_have_it_where_they_are_on(publisher: Make, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    made = publisher({"port": 1, "enable_metrics": True}, **{SHARED: str(tmp_path / "shared")})
    publish(made)
    publish(made)
    found = values_of(MultiProcessCollector(CollectorRegistry(), path=str(tmp_path / "shared")).collect())
    assert found["handler_up"] == {(): 1.0}
    assert "rank_last_sign_timestamp_seconds" in found
    assert len(list((tmp_path / "shared").iterdir())) == 2


def test_a_folder_that_others_share_is_left_alone(publisher: Make, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    publish(publisher({"port": 1, "enable_metrics": False}, **{SHARED: str(tmp_path / "shared")}))
    assert list((tmp_path / "shared").iterdir()) == []


def test_what_the_library_cannot_read_is_not_shared(
    publisher: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "problem_of_shared", lambda _files, _metrics: "it cannot")
    (tmp_path / "shared").mkdir()
    made = publisher({"enable_metrics": True}, **{SHARED: str(tmp_path / "shared")})
    publish(made)
    assert list((tmp_path / "shared").iterdir()) == []
    assert made._shared == ""


def test_a_file_that_cannot_be_written_costs_nothing(
    publisher: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish(publisher({"port": 1}, **{FILE: str(tmp_path / "missing" / "kit.prom")}))
    assert "metrics could not be published" in caplog.text


def test_a_disk_that_does_not_answer_holds_nobody_up(
    publisher: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "look_at_disk", lambda *_arguments: time.sleep(600))
    made = publisher({"port": 1}, **{FILE: str(tmp_path / "kit.prom")})
    began = time.monotonic()
    made.act_on_time()
    assert not made._reap()
    wait_until(made._reap, "the child is gone")
    assert time.monotonic() - began < LONG


def test_a_refused_process_costs_no_descriptor(
    publisher: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise BlockingIOError("no more processes")

    made = publisher({"port": 1}, **{FILE: str(tmp_path / "kit.prom")})
    before = list(Path("/proc/self/fd").iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(os, "fork", refuse)
        with pytest.raises(BlockingIOError):
            made.act_on_time()
    assert len(list(Path("/proc/self/fd").iterdir())) == len(before)


def test_a_child_that_the_kernel_reaped_has_ended(
    publisher: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = publisher({"port": 1}, **{FILE: str(tmp_path / "kit.prom")})
    made.act_on_time()
    pid, _pipe = made._child or (0, 0)
    os.waitpid(pid, 0)
    assert made._reap(LONG)
    assert (tmp_path / "kit.prom").is_file()


def test_a_shared_folder_that_comes_later_is_checked_too(publisher: Make, tmp_path: Path) -> None:
    made = publisher({"port": 1, "enable_metrics": True}, **{SHARED: str(tmp_path / "later")})
    publish(made)
    assert not made._is_checked


def test_nothing_is_done_where_nobody_asks(publisher: Make) -> None:
    made = publisher({"enable_metrics": True})
    assert made.next_due() == float("inf")
    made.act_on_time()
    assert made._child is None


def test_a_cause_is_read_once(incidents: Path) -> None:
    first = look_at_disk(incidents, {}, DiskLimits())
    for path in incidents.glob("*/incident.json"):
        path.unlink()
    assert look_at_disk(incidents, first.causes, DiskLimits()).causes == first.causes


def test_many_incidents_are_read_bit_by_bit(incidents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_MAX_READ", 1)
    assert sorted(look_at_disk(incidents, {}, DiskLimits()).causes.values()) == ["unknown", "unread"]


def test_a_folder_that_is_gone_tells_nothing(tmp_path: Path) -> None:
    assert look_at_disk(tmp_path / "gone", {}, DiskLimits()).bytes is None


@pytest.mark.story
def test_a_server_that_ends_leaves_its_last_file(start_server: Callable[..., Server], tmp_path: Path) -> None:
    path = tmp_path / "kit.prom"
    server = start_server(environ={FILE: str(path)})
    wait_until(path.exists, "the first file is there")
    assert read(path)["handler_up"] == {(): 1.0}
    server.kill("scheduler_TP1")
    server.wait_for_the_end()
    assert read(path)["handler_up"] == {(): 0.0}
    assert sum(read(path)["incidents"].values()) == 1


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/null")], ids=["pipe", "link"])
def test_what_is_no_file_is_not_replaced_and_told_once(
    publisher: Make,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[Path], object],
) -> None:
    path = tmp_path / "kit.prom"
    make(path)
    made = publisher({"port": 30001}, **{FILE: str(path)})
    publish(made)
    publish(made)
    assert [record.getMessage() for record in caplog.records] == [
        f"{FILE} names no file for metrics: {path} is there and is no file"
    ]
    assert not path.is_file()


HOSTILE = 'a"b\\c\nd é'
METRICS = [
    Metric("kit_up", "Whether\nit is.", (({}, 1.0),)),
    Metric("kit_incidents", "How many.", (({"kind": "killed", "cause": HOSTILE}, 2.0), ({"kind": "hang"}, 0.5))),
    Metric("kit_hits_total", "Hits.", (({"port": "1"}, 7.0),), type="counter"),
    Metric("kit_unknown", "Nothing is known of it.", ()),
]
VALUES = {("kit_up", ()): 1.0, ("kit_hits_total", (("port", "1"),)): 7.0}
VALUES |= {
    ("kit_incidents", (("cause", HOSTILE), ("kind", "killed"))): 2.0,
    ("kit_incidents", (("kind", "hang"),)): 0.5,
}


def test_the_text_says_to_prometheus_what_was_measured() -> None:
    families = list(text_string_to_metric_families(format_text(METRICS)))
    assert samples_of(families) == VALUES
    assert {family.name: family.type for family in families}["kit_hits"] == "counter"
    assert families[0].documentation == "Whether\nit is."


def samples_of(families: Iterable[Any]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def read_shared(metrics: list[Metric], folder: Path) -> list[Any]:
    """Have the library read what a process shares."""
    for name, data in shared_files(metrics, 4711, 17.0).items():
        (folder / name).write_bytes(data)
    return list(MultiProcessCollector(CollectorRegistry(), path=str(folder)).collect())


def test_the_library_reads_the_files_that_processes_share(tmp_path: Path) -> None:
    families = read_shared(METRICS, tmp_path)
    assert samples_of(families) == VALUES
    assert {family.name: family.type for family in families} == {
        "kit_up": "gauge",
        "kit_incidents": "gauge",
        "kit_hits": "counter",
    }


def test_more_than_a_page_is_read(tmp_path: Path) -> None:
    many = [Metric("kit_many", "Many.", tuple(({"rank": f"TP{n}"}, float(n)) for n in range(500)))]
    (family,) = read_shared(many, tmp_path)
    assert sorted(sample.value for sample in family.samples) == [float(n) for n in range(500)]


def test_what_the_installed_library_reads_is_no_problem() -> None:
    assert problem_of_shared(shared_files(METRICS, 1, 1.0), METRICS) == ""


def test_what_it_cannot_read_is_one() -> None:
    without = shared_files([metric for metric in METRICS if metric.type == "gauge"], 1, 1.0)
    assert "reads no kit_hits_total" in problem_of_shared(without, METRICS)
    assert "cannot read" in problem_of_shared({"gauge_all_1.db": b"\xff\x00\x00\x00\x00\x00\x00\x00\xff"}, METRICS)


def test_without_the_library_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_CHECK", "import there_is_no_such_library")
    assert "ModuleNotFoundError" in problem_of_shared(shared_files(METRICS, 1, 1.0), METRICS)
