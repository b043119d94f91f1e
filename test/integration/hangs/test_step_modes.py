"""One rank of a real server is killed, however it is spread and schedules: its steps say what it ran, and in which."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from integration.hangs import cpu_kernels
from integration.hangs.hang_story import LONG
from integration.hangs.test_divergence import Asked
from integration.import_hook import write_site
from integration.scenario import serving, wait_for_incident
from lanelib.lanes import ensure_lane
from lanelib.servers import parallel_env
from sglang_crashkit.incident.store import read_steps
from sglang_crashkit.model.step import Step
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(1800)]

#: Batches that are launched, and not processed yet, as the rank dies; overlapped, or one in each stage of a pipeline.
UNDER_WAY = 3
DRAFTED = 4
#: A request is at work once there are so many pieces of its answer.
AT_WORK = 10


@dataclass(frozen=True)
class Way:
    """How a server is started, and what its steps are."""

    arguments: tuple[str, ...]  # of the server
    tp: int  # tensor-parallel ranks
    victim: str  # the rank that is killed
    #: mode of a batch, and of the model's pass in it, of steps that there are
    modes: frozenset[tuple[str, str]] = frozenset({("extend", "extend"), ("decode", "decode")})
    compared: bool = False  # two ranks run the same steps
    model: str = ""  # class of the model; the lane's own where it is empty


WAYS = {
    "without overlap": Way(("--disable-overlap-schedule",), 2, "scheduler_TP1", compared=True),
    "in stages": Way(("--pp-size", "2"), 1, "scheduler_PP1"),
    # Llama's heads are not spread so.
    "with DP attention": Way(
        ("--enable-dp-attention", "--dp", "2"),
        2,
        "scheduler_DP1_TP1",
        frozenset({("extend", "extend"), ("decode", "decode"), ("idle", "idle")}),
        model="Qwen3ForCausalLM",
    ),
    "speculating": Way(
        ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(DRAFTED)),
        1,
        "scheduler",
        frozenset({("extend", "extend"), ("decode", "target_verify")}),
    ),
}


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


@pytest.fixture(scope="module")
def left(way: Way, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of the incident, and what it holds."""
    lane, crash = ensure_lane("0.5.23"), tmp_path_factory.mktemp("crash")
    arguments = [*way.arguments]
    if way.model:
        # A copy of the lane's model that is of another class; the weights are random in any case.
        model = tmp_path_factory.mktemp("model")
        shutil.copytree(lane.model_dir, model, dirs_exist_ok=True)
        config = json.loads((lane.model_dir / "config.json").read_text())
        config |= {"architectures": [way.model], "model_type": way.model.removesuffix("ForCausalLM").lower()}
        (model / "config.json").write_text(json.dumps(config))
        arguments += ["--model-path", str(model)]
    # The stages of a pipeline are ranks like others.
    ranks = 1 if way.victim == "scheduler" else 2
    environ = parallel_env(lane, ranks, 1) | write_site(tmp_path_factory.mktemp("site"), *cpu_kernels.SITE)
    # The lane imports its own model only.
    environ |= {"SGLANG_DISABLED_MODEL_ARCHS": ""} if way.model else {}
    with serving(lane, crash, *arguments, tp=way.tp, env=environ) as server:
        Asked(server, "alone", 12, "1 2 3").join(LONG)
        # No more tokens than the KV pool holds, or the last of them waits for the others' end.
        steady = [Asked(server, f"steady-{number}", 1500, "1 2 3 4 " * (number + 1)) for number in range(4)]
        wait_until(lambda: all(one.chunks > AT_WORK for one in steady), "all of them decode", LONG)
        os.kill(server.pid_of(f"sglang::{way.victim}"), signal.SIGKILL)
        stored = wait_for_incident(crash, LONG)
    return stored.path, stored.document or {}


@pytest.fixture
def steps(left: tuple[Path, dict[str, Any]]) -> dict[str, list[Step]]:
    """The steps of each rank, by its title."""
    folder, document = left
    titles = {process["pid"]: process["title"].removeprefix("sglang::") for process in document["processes"]}
    return {titles[one.pid]: list(one.steps) for one in read_steps(folder)}


def test_each_step_says_what_was_run(way: Way, steps: dict[str, list[Step]]) -> None:
    # It may have died on the way to the next one.
    ran = {(step.mode, step.forward) for its in steps.values() for step in its if step.phase != "received"}
    assert way.modes <= ran, ran
    assert ran <= way.modes | {("idle", "idle"), ("mixed", "mixed")}, ran
    decodes = [step for its in steps.values() for step in its if step.mode == "decode"]
    assert all(step.size and [one.tokens for one in step.requests] == [1] * step.size for step in decodes)


def test_each_step_came_to_its_end_but_those_under_way(steps: dict[str, list[Step]]) -> None:
    for its in steps.values():
        numbers = [step.number for step in its]
        assert numbers == [*range(numbers[0], numbers[0] + len(numbers))]
        assert {step.phase for step in its[:-UNDER_WAY]} == {"processed"}
        # A replica has some of them.
        steady = [one for step in its for one in step.requests if one.rid.startswith("steady")]
        assert len(steady) > 1
        lengths = [one.length for one in steady if one.rid == steady[-1].rid]
        assert lengths == sorted(lengths)


def test_the_step_it_died_in_is_told_with_its_requests(way: Way, left: tuple[Path, dict[str, Any]]) -> None:
    folder, document = left
    victim = next(one for one in document["processes"] if one["title"] == f"sglang::{way.victim}")
    in_step = victim["steps"]["in_step"]
    assert {rid.partition("-")[0] for rid in in_step["rids"]} == {"steady"}
    assert f"died in step {in_step['number']}" in (folder / "summary.md").read_text().replace(",", "")


def test_ranks_are_compared_where_they_run_the_same_steps(way: Way, left: tuple[Path, dict[str, Any]]) -> None:
    found = left[1]["divergence"]
    assert (found["kind"] if found else None) == ("none" if way.compared else None)
