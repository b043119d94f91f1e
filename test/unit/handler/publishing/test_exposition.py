from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from sglang_crashkit.handler.publishing import exposition
from sglang_crashkit.handler.publishing.exposition import (
    Metric,
    encode_shared,
    format_text,
    problem_of_shared,
    shared_files,
)

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
    samples = {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}
    assert samples == VALUES
    assert {family.name: family.type for family in families}["kit_hits"] == "counter"
    assert families[0].documentation == "Whether\nit is."


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    for name, data in shared_files(METRICS, 4711, 17.0).items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def test_the_library_reads_the_files_that_processes_share(shared: Path) -> None:
    families = list(MultiProcessCollector(CollectorRegistry(), path=str(shared)).collect())
    samples = {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}
    assert samples == VALUES
    assert {family.name: family.type for family in families} == {
        "kit_up": "gauge",
        "kit_incidents": "gauge",
        "kit_hits": "counter",
    }


def test_more_than_a_page_is_read(tmp_path: Path) -> None:
    many = [Metric("kit_many", "Many.", tuple(({"rank": f"TP{n}"}, float(n)) for n in range(500)))]
    (tmp_path / "gauge_livemostrecent_1.db").write_bytes(encode_shared(many, "gauge", 1.0))
    (family,) = MultiProcessCollector(CollectorRegistry(), path=str(tmp_path)).collect()
    assert sorted(sample.value for sample in family.samples) == [float(n) for n in range(500)]


def test_what_the_installed_library_reads_is_no_problem() -> None:
    assert problem_of_shared(shared_files(METRICS, 1, 1.0), METRICS) == ""


def test_what_it_cannot_read_is_one() -> None:
    files = shared_files(METRICS, 1, 1.0)
    assert "reads no kit_hits_total" in problem_of_shared(
        {**files, "counter_1.db": encode_shared([], "gauge", 1)}, METRICS
    )
    assert "cannot read" in problem_of_shared({"gauge_all_1.db": b"\xff\x00\x00\x00\x00\x00\x00\x00\xff"}, METRICS)


def test_without_the_library_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "_CHECK", "import there_is_no_such_library")
    assert "ModuleNotFoundError" in problem_of_shared(shared_files(METRICS, 1, 1.0), METRICS)
