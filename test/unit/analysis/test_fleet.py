from __future__ import annotations

import json

import pytest

from sglang_crashkit.analysis.fleet import group
from sglang_crashkit.model.incident import FleetIncident


def incident(host: int, what: str = "SIGSEGV", seconds: float = 1.0, **attributes: str) -> FleetIncident:
    return FleetIncident(f"h{host}", seconds, f"/c/h{host}", "killed", ("scheduler", what), "cuda_fault", attributes)


def test_the_same_fault_is_counted_by_incident_and_host() -> None:
    one, other = group([incident(1), incident(1, seconds=9.0), incident(2), incident(3, "SIGBUS")])
    assert (one.fault, one.count, one.hosts) == (("scheduler", "SIGSEGV"), 3, ("h1", "h2"))
    assert (one.first, one.last, one.path) == (1.0, 9.0, "/c/h1")
    assert one.causes == {"cuda_fault": 3}
    assert other.hosts == ("h3",)


def fleet() -> list[FleetIncident]:
    """31 hosts with a fault and one driver; 40 with another fault, of which 10 have that driver, too."""
    return [
        *(incident(n, driver="580", release="0.5.21" if n else "0.5.23") for n in range(31)),
        *(incident(n, "SIGBUS", driver="580" if n < 110 else "570", release="0.5.19") for n in range(100, 140)),
    ]


def test_what_the_hosts_of_a_fault_share_has_its_numbers() -> None:
    (found,) = [one for one in group(fleet()) if "SIGSEGV" in one.fault]
    assert found.lines(1000) == [
        "seen on 31 of 1000 hosts",
        "30 of 31 with release 0.5.21, and 0 of 40 other hosts",
        "all 31 with driver 580, and 10 of 40 other hosts",
        "first with release 0.5.21: none on the 40 hosts that have incidents with an older one",
    ]


def test_what_everybody_has_sets_nobody_apart() -> None:
    rows = [incident(n, "SIGSEGV" if n < 5 else "SIGBUS", driver="580") for n in range(10)]
    assert [one.contrasts for one in group(rows)] == [(), ()]


def test_two_hosts_tell_nothing() -> None:
    rows = [incident(n, "SIGSEGV" if n < 2 else "SIGBUS", driver=str(n < 2)) for n in range(10)]
    assert [one.contrasts for one in group(rows) if "SIGSEGV" in one.fault] == [()]


@pytest.mark.parametrize("release", ["unknown", "", "0.5.x"])
def test_a_release_that_is_none_is_left_out(release: str) -> None:
    rows = [incident(n, release=release) for n in range(5)] + [incident(n, "SIGBUS", release="0.5.9") for n in range(9)]
    assert all(one.since_release is None for one in group(rows))


def test_releases_are_ordered_by_number_and_not_by_letter() -> None:
    rows = [incident(n, release="0.5.10") for n in range(5)]
    rows += [incident(n, "SIGBUS", release="0.5.9") for n in range(10, 20)]
    assert [(one.since_release, one.older_hosts) for one in group(rows) if "SIGSEGV" in one.fault] == [("0.5.10", 10)]


def test_it_can_be_told_to_a_program() -> None:
    assert json.loads(json.dumps([one.to_json() for one in group(fleet())]))[0]["contrasts"]
