from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_crashkit.capture.flight_request import FlightPlace, NoRecorderError, parse_answer
from sglang_crashkit.kernel.procfs import server_key
from sglang_crashkit.model.flight_dump import Group
from sglang_crashkit.srt.flight_recorder import describe_collectives
from unit.support.flight_dumps import document, entry, pickled
from unit.support.waiting import LONG

_SCRIPT = """
import json, os, sys, setproctitle
from sglang_crashkit.kernel import procfs
from sglang_crashkit.srt.flight_recorder import prepare_flight_recorder
setproctitle.setproctitle(sys.argv[1])
for _ in range(int(sys.argv[2])):
    prepare_flight_recorder()
stat = procfs.read_stat(os.getpid())
names = {name: value for name, value in os.environ.items() if name.startswith("TORCH_")}
print(json.dumps({"pid": stat.pid, "start_ticks": stat.start_ticks, "environ": names}))
"""
PIPE, DUMP, OLD_DUMP = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
SIZE = "TORCH_FR_BUFFER_SIZE"

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run the hook in a process of that title, and return what it set and said."""
    runtime = tmp_path / "runtime"
    runtime.mkdir()

    def prepare(title: str = "sglang::scheduler_TP1", times: int = 1, **environ: str | None) -> dict[str, Any]:
        defaults = {
            SIZE: "2000",
            "SGLANG_CRASHKIT_FLIGHT_FOLDER": str(tmp_path / "crash" / "flight_recorder"),
            "SGLANG_CRASHKIT_SOCKET": str(runtime / "handler.sock"),
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH_", "SGLANG_"))}
        given = {name: value for name, value in (defaults | environ).items() if value is not None}
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT, title, str(times)],
            env=inherited | given,
            capture_output=True,
            text=True,
            timeout=LONG,
            check=True,
        )
        told: dict[str, Any] = json.loads(done.stdout)
        place = FlightPlace.read(runtime, told["pid"], told["start_ticks"])
        return told | {"place": place, "stderr": done.stderr}

    return prepare


@pytest.mark.parametrize("times", [1, 2])
def test_each_scheduler_gets_names_of_its_own(run: Run, tmp_path: Path, times: int) -> None:
    told = run(times=times)
    name = f"{told['pid']}-{told['start_ticks']}"
    key = server_key(told["pid"], told["start_ticks"])
    pipe, dump = f"{tmp_path}/runtime/{name}.nccl-", f"{tmp_path}/crash/flight_recorder/{key}-rank"
    assert told["environ"] == {SIZE: "2000", PIPE: pipe, DUMP: dump}
    assert told["place"] == FlightPlace(pipe, dump, is_own=True)
    # The crash handler makes it: the disk may be one that does not answer.
    assert not (tmp_path / "crash").exists()
    assert sorted(path.name for path in (tmp_path / "runtime").iterdir()) == [f"{name}.flight"]
    assert told["stderr"] == ""


@pytest.mark.parametrize("name", [DUMP, OLD_DUMP])
def test_what_the_user_set_stays(run: Run, tmp_path: Path, name: str) -> None:
    told = run(**{name: "/theirs/dump", PIPE: "/theirs/pipe", SIZE: "7"})
    assert told["environ"] == {SIZE: "7", PIPE: "/theirs/pipe", name: "/theirs/dump"}
    assert told["place"] == FlightPlace("/theirs/pipe", "/theirs/dump", is_own=False)
    assert not (tmp_path / "crash").exists()


@pytest.mark.parametrize(
    "changed",
    [
        {"title": "sglang::detokenizer"},
        {"title": "python"},
        {"SGLANG_CRASHKIT_FLIGHT_FOLDER": None},
        {"SGLANG_CRASHKIT_SOCKET": None},
        {SIZE: "0"},
        {SIZE: None},
        {SIZE: "many"},
    ],
)
def test_nothing_is_set_where_it_is_not_wanted(run: Run, tmp_path: Path, changed: dict[str, Any]) -> None:
    told = run(**changed)
    assert not {PIPE, DUMP} & told["environ"].keys()
    assert told["place"] is None
    assert list((tmp_path / "runtime").iterdir()) == []
    assert not (tmp_path / "crash").exists()


def test_without_a_pipe_pytorch_makes_none(run: Run, tmp_path: Path) -> None:
    told = run(SGLANG_CRASHKIT_SOCKET=str(tmp_path / "missing" / "handler.sock"))
    assert told["environ"] == {SIZE: "2000"}
    assert "prepare_flight_recorder failed" in told["stderr"]


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[dict[str, Any]] | None], list[tuple[bool, ...]]]:
    """Stand for PyTorch with four process groups, of which SGLang has coordinators for two; return what is asked."""

    def record(entries: list[dict[str, Any]] | None) -> list[tuple[bool, ...]]:
        groups = [type("Group", (), {"group_desc": text})() for text in ("default_pg", *["undefined"] * 3)]
        world = SimpleNamespace(
            pg_names={group: str(number) for number, group in enumerate(groups)},
            pg_group_ranks={group: {8: 0, 9: 1} for group in groups},
        )
        c10d = SimpleNamespace(_world=world, is_initialized=lambda: True, get_rank=lambda: 9)
        coordinator = SimpleNamespace(device_group=groups[1], cpu_group=groups[2])
        coordinators = {"attention_tp:0": lambda: coordinator, "pp:0": lambda: None}
        asked: list[tuple[bool, ...]] = []

        def dump(*how: bool) -> bytes:
            asked.append(how)
            return pickled(document(entries or []) | {"pg_config": {"": {"name": "", "desc": "", "ranks": "[0]"}}})

        monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", c10d)
        recorder = SimpleNamespace(_dump_fr_trace=dump) if entries is not None else SimpleNamespace()
        monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", recorder)
        monkeypatch.setitem(sys.modules, "sglang.srt.distributed.parallel_state", SimpleNamespace(_groups=coordinators))
        return asked

    return record


def test_each_process_group_has_sglangs_name_for_it(torch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    site = sys.path[-1]
    frames = [
        ("all_reduce", f"{site}/torch/distributed/distributed_c10d.py", 1),
        ("wrapped", f"{site}/sglang/srt/distributed/parallel_state.py", 2),
        ("_all_reduce", f"{site}/sglang/srt/managers/cache_controller.py", 3),
    ]
    entries = [entry(number, number, group=("3", "undefined"), backend="gloo", frames=frames) for number in range(2500)]
    asked = torch(entries)
    told = parse_answer(describe_collectives())
    assert told.rank == 9
    assert told.dump.groups == {
        "0": Group("default_pg", (8, 9)),
        "1": Group("attention_tp", (8, 9)),
        "2": Group("attention_tp", (8, 9)),
        "3": Group("hicache", (8, 9)),
    }
    assert [one.sequence for one in told.dump.entries] == list(range(500, 2500))
    assert str(told.dump.entries[0].frames[2]) == "_all_reduce (sglang/srt/managers/cache_controller.py:3)"
    # What puts stacks into words is never imported for it.
    monkeypatch.setitem(sys.modules, "torch._inductor.codecache", SimpleNamespace())
    describe_collectives()
    assert asked == [(True, False, False), (True, True, False)]


@pytest.mark.parametrize(
    ("entries", "reason"),
    [(None, "its PyTorch has no flight recorder of gloo"), ([], "its flight recorder has no entries: no operation")],
)
def test_where_there_is_no_recorder_it_says_so(torch: Callable[..., Any], entries: Any, reason: str) -> None:
    torch(entries)
    with pytest.raises(NoRecorderError, match=reason):
        parse_answer(describe_collectives())
