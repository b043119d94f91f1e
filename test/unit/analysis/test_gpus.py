from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sglang_crashkit.analysis.gpus import Holder, account
from sglang_crashkit.model.incident import iso_time

GIB = 1 << 30
NOW = 1_800_000_000.0
RANK = Holder(12, "sglang::scheduler_TP0", NOW - 100)
ECC = {"corrected_volatile": 0, "uncorrected_volatile": 0}


def gpu(index: int = 0, **facts: Any) -> dict[str, Any]:
    return {
        "index": index,
        "name": "NVIDIA H200",
        "bus_id": f"0000:0{index}:00",
        "uuid": f"GPU-{index}-a",
        "memory": {"used": 120 * GIB, "total": 140 * GIB},
        "processes": [],
        "errors": {},
    } | facts


def told(
    *gpus: dict[str, Any],
    holders: tuple[Holder, ...] = (RANK,),
    xids: tuple[dict[str, Any], ...] = (),
    start: tuple[dict[str, Any], ...] | None = None,
    problem: str = "",
    sees_all_pids: bool = True,
) -> dict[str, Any]:
    watched = {} if start is None else {"time": NOW, "gpus": start, "errors": {}}
    return msgspec.to_builtins(account(gpus, holders, xids, watched, problem, sees_all_pids=sees_all_pids))


def test_a_healthy_gpu_takes_a_line() -> None:
    busy = gpu(
        processes=[{"pid": 12, "used": 119 * GIB}, {"pid": 99, "used": None}],
        utilisation={"gpu": 97, "memory": 40},
        temperature=65,
        power=640.5,
        throttle=["gpu_idle"],
        errors={"Not Supported": ["nvlink"]},
    )
    lines = told(busy, start=())["lines"]
    assert lines == [
        "GPU 0 NVIDIA H200 (0000:00:00): 120.0 GiB of 140.0 GiB used; 119.0 GiB by sglang::scheduler_TP0 (pid 12); "
        "pid 99, not this server's; 97 % busy, 65 C, 640.5 W",
        f"Xid: none seen by this process (watched since {iso_time(NOW)})",
    ]


@pytest.mark.parametrize(
    ("listed", "named", "sees_all_pids", "level"),
    [
        (True, None, True, "established"),
        (True, None, False, "supported"),
        (True, "0-a", False, "established"),
        # By chance the host has another process of that pid.
        (True, "1-a", False, None),
        (False, "0-a", False, "supported"),
        (False, "GPU-0-a", True, None),
        (False, None, True, None),
    ],
)
def test_who_has_a_gpu_is_said_as_far_as_known(
    listed: bool, named: str | None, sees_all_pids: bool, level: str | None
) -> None:
    holder = Holder(12, "rank", NOW, named)
    processes = [{"pid": 12, "used": GIB}] if listed else []
    document = told(gpu(processes=processes), holders=(holder,), sees_all_pids=sees_all_pids)
    (device,) = document["devices"]
    assert [one["level"] for one in device["processes"]] == ([level] if level else [])
    assert (", supported)" in document["lines"][0]) == (level == "supported")


def test_errors_since_the_start_are_told_from_earlier_ones() -> None:
    before = {"ecc": ECC | {"uncorrected_volatile": 1}, "nvlink": {"0": {"up": 1, "replay": 7}, "1": {"up": 1}}}
    now = {
        "ecc": ECC | {"uncorrected_volatile": 1, "corrected_volatile": 4},
        "remapped_rows": {"pending": 1},
        "nvlink": {"0": {"up": 1, "replay": 19}, "1": {"up": 0}},
    }
    document = told(gpu(counters=now, throttle=["hw_slowdown"]), start=(gpu(counters=before),))
    (device,) = document["devices"]
    assert device["new_errors"] == {
        "ecc corrected_volatile": 4,
        "remapped_rows pending": 1,
        "nvlink 0 replay": 12,
        "nvlink 1 down": 1,
    }
    assert document["lines"][0].endswith(
        "; clocks held down by hw_slowdown; since the server started ecc corrected_volatile 4, "
        "remapped_rows pending 1, nvlink 0 replay 12, nvlink 1 down 1; "
        "from before the server started ecc uncorrected_volatile 1"
    )


def test_without_a_start_only_what_matters_by_itself_is_told() -> None:
    counters = {"ecc": {"corrected_volatile": 9, "uncorrected_volatile": 1}, "nvlink": {"0": {"up": 1, "replay": 5}}}
    document = told(gpu(counters=counters))
    assert document["devices"][0]["new_errors"] is None
    assert document["lines"][0].endswith("used; ecc uncorrected_volatile 1")


def test_a_gpu_that_is_lost_says_so() -> None:
    lost = {"index": 3, "errors": {"GPU is lost": ["all of it"], "Not Supported": ["ecc"]}}
    assert told(lost)["lines"][0] == "GPU 3: not read: all of it (GPU is lost)"
    assert told(start=({"index": 4},))["lines"][0] == "GPU 4: not read"


def test_a_gpu_that_stopped_answering_is_known_from_the_start() -> None:
    lost = {"index": 1, "errors": {"GPU is lost": ["all of it"]}}
    start = tuple({name: gpu(index)[name] for name in ("index", "name", "bus_id", "uuid")} for index in (0, 1, 2))
    xids = ({"xid": 79, "bus_id": "0000:01:00", "time": NOW},)
    holders = (Holder(12, "rank", NOW - 9, "1-a"), Holder(13, "other", NOW - 9, "2-a"))
    document = told(gpu(), lost, start=start, xids=xids, holders=holders)
    assert document["lines"][:3] == [
        "GPU 1 NVIDIA H200 (0000:01:00): rank (pid 12, supported); not read: all of it (GPU is lost)",
        "GPU 2 NVIDIA H200 (0000:02:00): other (pid 13, supported)",
        "1 more that no process of this server is known to have",
    ]
    assert [one["pid"] for one in document["xids"][0]["processes"]] == [12]


def test_an_xid_is_joined_to_the_rank_on_its_gpu() -> None:
    later = Holder(13, "sglang::scheduler_TP1", NOW + 1)
    both = gpu(1, processes=[{"pid": 12, "used": 1}, {"pid": 13, "used": 1}])
    xids = ({"xid": 79, "bus_id": "0000:01:00", "time": NOW},)
    document = told(both, holders=(RANK, later), xids=xids)
    (event,) = document["xids"]
    assert [one["pid"] for one in event["processes"]] == [12]
    assert document["lines"][1:] == [
        f"Xid 79 at {iso_time(NOW)} on GPU 1 (0000:01:00), sglang::scheduler_TP0 (pid 12), by NVML"
    ]


def test_an_xid_of_an_unknown_gpu_is_told() -> None:
    document = told(gpu(), xids=({"xid": 1234, "bus_id": None, "time": NOW},))
    assert document["lines"][1].endswith("on GPU ? (), no process of this server is known to have it, by NVML")


def test_no_xid_is_no_health() -> None:
    (line,) = told(problem="GPU is lost")["lines"]
    assert line == "Xid: none seen by this process (no NVML events: GPU is lost)"
