"""What Prometheus is told: in the file for node_exporter, and at the page of a server's own metrics."""

from __future__ import annotations

import json
import math
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from sglang_crashkit.handler import metrics
from sglang_crashkit.handler.collectors.received import Received
from sglang_crashkit.handler.metrics import FILE, SHARED, Gauge, MetricsPublisher, causes_in
from sglang_crashkit.handler.processes import ProcessTree
from sglang_crashkit.kernel.forked import is_reaped
from sglang_crashkit.kernel.pidfd import ExitStatus
from sglang_crashkit.memory.heartbeat import LOOP_TIME, HeartbeatWriter
from sglang_crashkit.memory.ring import write_blob
from sglang_crashkit.settings import Settings
from unit.support.server_driver import Server
from unit.support.stored import make_incident
from unit.support.waiting import LONG, wait_until

Make = Callable[..., MetricsPublisher]
Values = dict[str, dict[tuple[tuple[str, str], ...], float]]


def values_of(families: Iterable[Any]) -> Values:
    found: Values = {}
    for family in families:
        for sample in family.samples:
            labels = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "port"))
            found.setdefault(sample.name.removeprefix("sglang_crashkit_"), {})[labels] = sample.value
    return found


def read(path: Path) -> Values:
    return values_of(text_string_to_metric_families(path.read_text()))


#: No process has it.
REAPED = 5_000_000


@pytest.fixture
def incidents(tmp_path: Path) -> Path:
    (tmp_path / "incidents").mkdir()
    make_incident(tmp_path / "incidents", cause={"class": "host_oom"})
    make_incident(tmp_path / "incidents", kind="hang", seconds=1_800_000_000.0, cause=None)
    make_incident(tmp_path / "incidents", publish=False)
    return tmp_path / "incidents"


@pytest.fixture
def publisher(incidents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make a publisher of a server with two ranks, the second of which is dead, that publishes when it is asked to.

    What it shows is in the file ``shown``.
    """
    monkeypatch.setattr(metrics, "FIRST_SECS", 0.0)
    monkeypatch.setattr(metrics, "INTERVAL_SECS", 0.0)
    made, now, tree = list[MetricsPublisher](), time.monotonic(), ProcessTree(os.getpid())
    received, writers = Received(tree, Settings.from_environ({})), [HeartbeatWriter(), HeartbeatWriter()]
    received.pauses.counts["sglang::scheduler_TP2", "slow_step"] = 3
    for pid, title, writer, sign, exited_at in (
        (REAPED, "sglang::scheduler_DP0_TP1", writers[0], now - 60, None),
        (REAPED + 1, "sglang::scheduler_TP2", writers[1], now, 1.0),
    ):
        rank = tree.add_reaped(pid, title, ExitStatus(), 1.0)
        rank.exited_at = exited_at
        writer.words[LOOP_TIME] = sign
        received.heartbeats.follow(rank, writer.fd)

    def show(_event: str, gauges: list[Gauge]) -> None:
        (tmp_path / "shown").write_text(json.dumps(gauges))

    def make(arguments: dict[str, Any], **environ: str) -> MetricsPublisher:
        told = write_blob(json.dumps({"arguments": arguments}).encode())
        received.environment.hold(told, 0.0, ready=True)
        os.close(told)
        for name in (FILE, SHARED):
            monkeypatch.setenv(name, environ.get(name, ""))
        made.append(MetricsPublisher(tree, received, incidents, show))
        return made[-1]

    yield make
    for each in (*made, received, tree, *received.heartbeats.followed.values(), *writers):
        each.close()


def publish(publisher: MetricsPublisher) -> None:
    publisher.act_on_time()
    publisher.take_answer(LONG)


def test_the_file_has_what_is_known(publisher: Make, tmp_path: Path) -> None:
    path = tmp_path / "kit.prom"
    publish(publisher({"port": 30001}, **{FILE: str(path)}))
    found = read(path)
    assert found["handler_up"] == {(): 1.0}
    assert found["incidents"] == {
        (("cause", "host_oom"), ("kind", "killed")): 1,
        (("cause", "unknown"), ("kind", "hang")): 1,
    }
    assert found["last_incident_timestamp_seconds"] == {(): 1_800_000_000.0}
    assert found["rank_pauses"] == {(("kind", "slow_step"), ("rank", "TP2")): 3.0}
    ((rank, at),) = found["rank_last_sign_timestamp_seconds"].items()
    assert rank == (("rank", "DP0_TP1"),)
    assert 59 < time.time() - at < 60 + LONG
    assert abs(time.time() - found["updated_timestamp_seconds"][()]) < LONG
    # node_exporter is another user.
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert 'port="30001"' in path.read_text()
    assert list(tmp_path.glob("kit*")) == [path]


def test_the_last_file_says_that_the_handler_is_gone(publisher: Make, tmp_path: Path) -> None:
    made = publisher({"port": 1}, **{FILE: str(tmp_path)})
    publish(made)
    made.close()
    found = read(tmp_path / "sglang_crashkit_1.prom")
    assert found["handler_up"] == {(): 0.0}
    assert "rank_last_sign_timestamp_seconds" not in found
    assert sum(found["incidents"].values()) == 2


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_server_shows_them_where_its_metrics_are_on(publisher: Make, tmp_path: Path, is_enabled: bool) -> None:
    publish(publisher({"port": 1, "enable_metrics": is_enabled}, **{SHARED: str(tmp_path)}))
    assert (tmp_path / "shown").exists() is is_enabled
    if is_enabled:
        assert len(json.loads((tmp_path / "shown").read_text())) == 6


def test_a_disk_that_does_not_answer_holds_nobody_up(
    publisher: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics, "causes_in", lambda *_arguments: time.sleep(600))
    made = publisher({"port": 1}, **{FILE: str(tmp_path / "kit.prom")})
    began = time.monotonic()
    made.act_on_time()
    made.act_on_time()
    assert time.monotonic() - began < LONG
    assert "metrics could not be published" in caplog.text
    assert made.late
    # No other child is started until it is gone.
    wait_until(lambda: is_reaped(made.late), "the child is gone")


def test_a_disk_that_is_gone_is_not_taken_for_one_without_incidents(tmp_path: Path) -> None:
    assert causes_in(tmp_path / "incidents", {}) == {}
    assert causes_in(tmp_path / "gone" / "incidents", {}) is None


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/null")], ids=["pipe", "link"])
def test_what_is_no_file_is_not_replaced_and_told_once(
    publisher: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], object]
) -> None:
    path = tmp_path / "kit.prom"
    make(path)
    made = publisher({"port": 30001}, **{FILE: str(path)})
    publish(made)
    publish(made)
    assert [record.getMessage() for record in caplog.records] == [
        f"metrics could not be published: {path} exists and is not a regular file"
    ]
    assert not path.is_file()


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


# -- in the server's main process

#: Shows each list of gauges that it is given, as SGLang's own main process does: in the multiprocess mode.
SHOWS = """
import json, sys
from sglang_crashkit.srt.metrics import show_gauges
for gauges in json.loads(sys.argv[1]):
    show_gauges(gauges)
"""
HOSTILE = 'a"b\\c\nd é'


def shown(folder: Path, *rounds: object, code: str = SHOWS) -> Values:
    subprocess.run(
        [sys.executable, "-c", code, json.dumps(rounds)],
        env=os.environ | {SHARED: str(folder)},
        check=True,
        timeout=LONG,
    )
    return values_of(MultiProcessCollector(CollectorRegistry(), path=str(folder)).collect())


def gauge(name: str, *samples: tuple[dict[str, str], float]) -> list[Any]:
    return [f"sglang_crashkit_{name}", "What it is.", samples]


def test_the_main_process_shows_what_it_is_told(tmp_path: Path) -> None:
    found = shown(
        tmp_path,
        [
            gauge("incidents", ({"kind": "killed", "cause": HOSTILE}, 1.0), ({"kind": "hang", "cause": "x"}, 2.0)),
            gauge("rank_last_sign_timestamp_seconds", ({"rank": "TP0"}, 5.0), ({"rank": "TP1"}, 6.0)),
            gauge("last_incident_timestamp_seconds"),
        ],
        [
            gauge("incidents", ({"kind": "killed", "cause": HOSTILE}, 3.0)),
            gauge("rank_last_sign_timestamp_seconds", ({"rank": "TP0"}, 7.0)),
        ],
    )
    times = found["rank_last_sign_timestamp_seconds"]
    assert times[("rank", "TP0"),] == 7.0
    assert math.isnan(times[("rank", "TP1"),])
    # What is gone is counted no more.
    assert found["incidents"] == {
        (("cause", HOSTILE), ("kind", "killed")): 3.0,
        (("cause", "x"), ("kind", "hang")): 0.0,
    }
    assert "last_incident_timestamp_seconds" not in found


@pytest.mark.parametrize("gauges", [None, [1], [["sglang_crashkit_up", "x", [[{}, "y"]]]], [["other", "x", [[{}, 1]]]]])
def test_what_is_no_gauge_of_the_kit_shows_nothing_and_raises_nothing(tmp_path: Path, gauges: object) -> None:
    assert all(not values for name, values in shown(tmp_path, gauges).items() if name != "up")


def test_on_a_disk_that_is_nearly_full_nothing_is_written(tmp_path: Path) -> None:
    full = "import os\nclass Full: f_bavail, f_frsize = 10, 4096\nos.statvfs = lambda path: Full\n"
    assert shown(tmp_path, [gauge("handler_up", ({"port": "1"}, 1.0))], code=full + SHOWS) == {}
    assert list(tmp_path.iterdir()) == []
