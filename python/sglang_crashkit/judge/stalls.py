"""Stalls: hangs and slowness, and the calm states that look like them.

The evidence is of two kinds: stacks show where each process is (`_judge_stacks`), and log lines show which process
waited too long and whether work continues (`signs`). A finding names, in a group, the members that are elsewhere while
the others wait; in a pipeline, the upstream-most stage that waits for no stage before it; in a weight update, the
trainer; in a pair, the other side; with several nodes, the nodes without evidence. If all ranks are in the same wait,
it names no rank.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from sglang_crashkit.judge import signs, topology, watched
from sglang_crashkit.judge.activity import (
    Activity,
    activity_of,
    bare,
    frames_of,
    front_work,
    innermost,
    is_loop,
    is_own,
    role_by,
)
from sglang_crashkit.judge.components import component_of, way_out
from sglang_crashkit.judge.finding import TELLING, Finding, Place, finding_of, steps_of
from sglang_crashkit.judge.knowledge import load
from sglang_crashkit.model.case import Case, Process
from sglang_crashkit.model.event import Stack
from sglang_crashkit.model.sample import Frame

_Key = TypeVar("_Key")
#: Shares of a CPU: a runnable process below the first is starved; a waiting one above it works, below the second rests.
_STARVED, _RESTS = 0.1, 0.05
#: Seconds per shard of the weights from which loading counts as slow.
_SLOW = 30.0
_MAX_HEADLINE, _MAX_TOLD, _MAX_BECAUSE = 290, 3, 6
_TELLING_ALONE = frozenset({"file", "compile", "build_lock", "driver", "collective"})
_UPDATES = frozenset({"weights", "pause"})
_HELD = frozenset({"stopped_process", "starved_process", "stuck_in_kernel", "slow_storage"})
#: The purposes of a rank that prepares or runs a batch, wherever in the model it is.
_AT_A_BATCH = frozenset({"batch", "speculative", "sampling", "graphs", "schedule", "warmup"})


class Member(msgspec.Struct, kw_only=True):
    """One process and its samples, in order of time, with the activity that each shows."""

    process: Process
    name: str
    role: str
    stacks: list[Stack]
    activities: list[Activity]
    frames: list[tuple[Frame, ...]]
    is_on_cpu: bool = False  # its collectives run on the CPU, and sleep while they wait

    @property
    def last(self) -> Activity:
        """Its activity in the last sample that shows one."""
        return next((one for one in reversed(self.activities) if one.kind != "unknown"), self.activities[-1])

    @property
    def server(self) -> str:
        """A key that distinguishes its server from others of the same side; empty if it is not known."""
        sample = self.stacks[-1].sample
        return sample.rendezvous or (f"{sample.host} {sample.server}" if sample.server else "")

    @property
    def is_moving(self) -> bool:
        """Whether its samples show different functions, or the same wait but too much CPU time for a wait."""
        works = self.is_on_cpu and self.last.waits == "ranks" and self.cpu_share > _STARVED
        return works or len({_path(each) for each in self.frames if each}) > 1

    @property
    def common(self) -> Frame | None:
        """The innermost call that all samples have in common."""
        levels = zip(*(reversed(frames) for frames in self.frames if frames), strict=False)
        alike = itertools.takewhile(lambda level: len(set(_path(level))) == 1, levels)
        return next(iter(reversed([level[-1] for level in alike])), None)

    @property
    def goes_on(self) -> bool:
        """Whether its samples show that its loop still runs."""
        return self.is_moving and (self.common is None or not is_own(self.common) or is_loop(self.common))

    @property
    def came_through(self) -> bool:
        """Whether it left a collective that needs all ranks of its group between two samples."""
        steps = itertools.pairwise(zip(self.activities, map(_path, self.frames), strict=True))
        return any(one.needs_all and path != after and after for (one, path), (_next, after) in steps)

    @property
    def rests(self) -> bool:
        """Whether it stays in the same functions and uses hardly any CPU time."""
        return len(self.activities) > 1 and not self.is_moving and self.cpu_share < _RESTS

    @property
    def cpu_share(self) -> float:
        """Share of a CPU that it got between its first and its last sample; below 0 if not known."""
        first, last = self.stacks[0].sample, self.stacks[-1].sample
        seconds = last.time - first.time
        # A shorter time may contain no clock tick.
        return (last.cpu_secs - first.cpu_secs) / seconds if seconds >= 1.0 and last.cpu_secs > 0 else -1.0


def _path(frames: Iterable[Frame]) -> tuple[tuple[str, str], ...]:
    return tuple((one.function, one.file) for one in frames)


class Scene(msgspec.Struct, kw_only=True):
    """A case, prepared for this module."""

    case: Case
    members: list[Member]
    signs: signs.Signs
    where: Place  # of the first sign of a hang, else the end of the case


def find_stalls(case: Case) -> list[Finding]:
    """Return findings about processes without progress, and about calm states that look like it."""
    read = signs.read(case)
    if case.watched is not None and not case.watched.is_hang and not watched.waited_in_vain(case):
        return [*watched.compare(case), *watched.conclude(case), *signs.judge(read, case)]
    scene = Scene(case=case, members=_members(case), signs=read, where=read.where or signs.end_of(case))
    found = _judge_stacks(scene)
    if case.watched is None or not any(one.weight >= TELLING for one in found):
        found += signs.judge(scene.signs, case)
    if not any(_tells(one, case) for one in found):
        found += watched.conclude(case, scene.where) if case.watched else signs.judge_silence(scene.signs, case)
    for one in found:
        # A wait that all ranks share does not show that its component failed; nor does a process held by the kernel.
        step = way_out(one.component, case.arguments, is_seen=one.kind != "symmetric_stall")
        if one.weight >= 60 and one.kind not in _HELD and step:
            one.next.insert(2, step)
    return found


def _tells(finding: Finding, case: Case) -> bool:
    """Return whether a finding suffices; ranks at work explain a silence that the crash handler noticed."""
    return finding.weight >= TELLING or (case.watched is not None and finding.kind == "busy")


def _members(case: Case) -> list[Member]:
    """Return the processes with stacks; samples of one process in several files are merged."""
    found: dict[tuple[object, ...], list[tuple[Process, Stack]]] = {}
    # Not every tool names the rank of a process: find it by host and pid.
    ranked = (one for one in case.schedulers if one.ranks)
    known = {(stack.sample.host, stack.sample.pid): one for one in ranked for stack in one.stacks}
    for seen_in in case.processes.values():
        # The stack with which a process died shows nothing about a hang.
        for stack in () if any(one.fatal for one in seen_in.stacks) else seen_in.stacks:
            sample = stack.sample
            if not (sample.threads or sample.native or sample.state or sample.doing or sample.problem):
                continue  # a list of processes shows no more than that it is there
            process = (known.get((sample.host, sample.pid)) if sample.pid else None) or seen_in
            pid, who = sample.pid or process.pid, process.who or sample.title
            key = (process.side, sample.host, who, pid) if pid else (process.side, process.node, process.who)
            found.setdefault(key, []).append((process, stack))
    members = []
    for seen in found.values():
        process = seen[0][0]
        stacks = sorted((stack for _process, stack in seen), key=lambda one: (one.sample.time or one.at, one.order))
        frames = [frames_of(one.sample) for one in stacks]
        role = process.role or next(filter(None, map(role_by, frames)), "")
        name = topology.short_name(process) if process.ranks else process.who or role
        activities = [activity_of(one.sample) for one in stacks]
        members.append(
            Member(
                process=process, name=name, role=role, stacks=stacks, activities=activities, frames=frames,
                is_on_cpu=case.arguments.get("device") == "cpu",
            )
        )  # fmt: skip
    for (_side, role), alike in _by(members, lambda one: (one.process.side, one.role)).items():
        for one in alike:
            if one.process.ranks or (len(alike) > 1 and one.name not in ("", role)):
                continue
            pid = one.stacks[-1].sample.pid or one.process.pid
            by_pid = (f"{role} (pid {pid})" if role else f"pid {pid}") if pid else one.name or "a process"
            one.name = role if role and len(alike) == 1 else by_pid
    are_pair = len({one.process.side for one in members} - {""}) > 1
    are_apart = len({one.stacks[-1].sample.host for one in members} - {""}) > 1
    for one in members:
        host, side = one.stacks[-1].sample.host, one.process.side
        one.name += (f" of {side}" if are_pair and side else "") + (f" on {host}" if are_apart else "")
    for alike in _by(members, lambda one: (one.process.side, one.name)).values():
        if len(alike) > 1 and alike[0].server:
            for one in alike:
                one.name = f"{one.name} (pid {one.process.pid})"
    return members


# -- findings from stacks


def _judge_stacks(scene: Scene) -> list[Finding]:
    members = scene.members
    if held := _held(scene, members):
        return [held]
    if watched.waited_in_vain(scene.case):
        return watched.conclude(scene.case, scene.where)
    if (pid := watched.beside_ranks(scene.case)) is not None:
        return _judge_beside(scene, [one for one in members if one.role == "scheduler" or one.process.pid == pid])
    if compared := watched.compare(scene.case, scene.where):
        return compared
    ranks = (
        [one for one in members if one.role == "scheduler"]
        or [one for one in members if not one.role and any(map(is_own, one.frames[-1]))]
        or [one for one in members if not one.role and one.last.kind in _TELLING_ALONE]
    )
    found = []
    for (side, _server), some in _by(ranks, lambda one: (one.process.side, one.server)).items():
        found += _judge_ranks(scene, side, some)
    if not found or (found[0].who is None and found[0].kind != "rank_divergence"):
        # The stacks name no rank and show no divergence, so ask the flight recorders which rank is behind.
        found = watched.compare_waits(scene.case, scene.where) or found
    if any(_tells(one, scene.case) for one in found):
        return found
    return [*_judge_beside(scene, members), *found] or _calm(scene, members)


def _held(scene: Scene, members: Sequence[Member]) -> Finding | None:
    """Return a finding if the kernel's state of a process explains the case by itself."""
    important = [one for one in members if one.role not in ("router", "encoder", "trainer")]
    row, steps = "", []
    if named := [one for one in important if one.last.kind in ("stopped", "traced")]:
        row = "stopped"
        steps = [step for one in named[:2] for step in steps_of("continue", pid=one.process.pid or None, name=one.name)]
    elif named := [one for one in important if all(each.kind == "disk_sleep" for each in one.activities)]:
        loads = any(bare(frame.function).startswith("load_") for frames in named[0].frames for frame in frames)
        row = "load_in_kernel" if loads else "in_kernel"
    elif named := [one for one in important if one.role and one.last.kind == "dead" and one.stacks[1:]]:
        row = "gone"
    elif named := [one for one in important if 0.0 <= one.cpu_share < _STARVED
                   # Most samples suffice: in others its main thread may wait for a starved thread of its own.
                   and 2 * sum(stack.sample.state == "R" for stack in one.stacks) > len(one.stacks)][:1]:  # fmt: skip
        row = "starved"
    # Other processes of the front end are left out: their activities show nothing about the cause.
    group = [one for one in members if one.role == "scheduler"]
    group += [one for one in named if one not in group]
    # One sample proves nothing: a healthy process is in uninterruptible sleep for a moment now and then.
    level = "established" if row.endswith("in_kernel") and len(named[0].activities) > 1 else None
    return _finding(scene, row, named, group, steps=steps, level=level) if named else None


def _judge_ranks(scene: Scene, side: str, members: Sequence[Member]) -> list[Finding]:
    is_going = any(one.goes_on for one in members) and all(one.goes_on or one.last.is_for_requests for one in members)
    if is_going and not scene.signs.is_hang:
        return []
    layout = topology.topology_of(scene.case, side, (one.process.ranks for one in members))
    by_group = _by(members, lambda one: layout.group_of(one.process.ranks))
    groups = [by_group[key] for key in sorted(by_group)]
    if not scene.signs.is_hang:
        groups = [group for group in groups if not any(one.came_through for one in group)]
    if layout.pp > 1 and groups and any(one.last.kind == "p2p" for one in members):
        of_pipeline = _judge_pipeline(scene, layout, members)
        return [of_pipeline] if of_pipeline else []
    found = [one for group in groups if (one := _judge_group(scene, layout, group)) is not None]
    return sorted(found, key=lambda one: -one.weight)[:1]


def _judge_group(scene: Scene, layout: topology.Topology, group: Sequence[Member]) -> Finding | None:
    """Name the members of a group that are in no collective or GPU wait while the others are.

    Returns None if they wait for requests, or if the samples show no activity.
    """
    is_awake = any(one.last.kind in ("idle", "socket", "own", "gil") for one in group)
    # The first rank sends the requests to the others: if it waits in the broadcast too, another rank has not joined.
    is_calm = scene.signs.is_alive or len(group) == 1 or all(one.process.ranks.get("tp", 0) != 0 for one in group)
    if all(one.last.is_for_requests for one in group) and (is_awake or (is_calm and not scene.signs.is_hang)):
        return None
    updating = [one for one in group if one.last.purpose in _UPDATES and not one.last.is_work]
    is_update = updating and all(one in updating or one.last.is_for_requests for one in group)
    if is_update and (scene.signs.is_hang or all(one.last.waits == "ranks" for one in group)):
        return _weight_update(scene, group)
    waiting = [one for one in group if one.last.waits in ("ranks", "gpu")]
    elsewhere = [one for one in group if one.last.waits not in ("ranks", "gpu")]
    if not elsewhere:
        return _all_wait(scene, layout, group)
    if not waiting:
        return _none_waits(scene, group)
    idle = [one for one in elsewhere if one.last.is_for_requests]
    awaited = [one for one in elsewhere if one not in idle] or idle
    if awaited is idle:
        if all(one.last.is_for_requests for one in waiting):
            return None
        return _branched(scene, "divergence", idle if len(idle) < len(waiting) else [], group)
    if len(awaited) > 1 and len(awaited) > len(waiting):
        return _none_waits(scene, awaited, group)
    first = awaited[0].last
    if scene.signs.is_alive and not first.is_work:
        return None  # a single sample of a server at work looks like this
    if first.is_work and (not scene.signs.was_ended or first.kind == "weight_load"):
        return _at_work(scene, awaited, group)
    if first.kind in ("storage", "http", "transfer"):
        return _waits_for_a_program(scene, awaited, group)
    kind = "driver_stuck" if first.kind == "driver" and len(awaited) > 1 else None
    return _finding(scene, "awaited", awaited, group, kind=kind, steps=_own_steps(awaited))


def _none_waits(scene: Scene, members: Sequence[Member], group: Sequence[Member] | None = None) -> Finding | None:
    """Return a finding about ranks that do not wait for each other."""
    group = group or members
    kinds = _by(members, lambda one: one.last.kind)
    kind, most = max(kinds.items(), key=lambda item: len(item[1]))
    if kind in ("unknown", "dead"):
        return None
    if 2 * len(most) > len(members) or len(members) == 1:
        if kind == "idle":
            return None
        if kind == "driver":
            is_lazy = bool(re.search("^_init|Module|Library|Kernel", most[0].last.operation))
            pid = most[0].process.pid or None
            return _finding(scene, "driver", most if len(group) == 1 else [], group, is_lazy=is_lazy, pid=pid)
        if most[0].last.is_work:
            return _at_work(scene, most, group)
        if kind in ("transfer", "http", "storage"):
            return _waits_for_a_program(scene, most, group)
        if kind == "build_lock":
            return _finding(scene, "build_lock", [], group)
        if kind == "own":
            return _own_work(scene, most, group)
    if not scene.signs.is_hang and (scene.signs.is_alive or any(one.is_moving for one in group)):
        return None
    return _finding(scene, "no_progress", [], group)


def _own_work(scene: Scene, members: Sequence[Member], group: Sequence[Member]) -> Finding | None:
    stuck = [one for one in members if not one.is_moving or ((own := one.common) and is_own(own) and not is_loop(own))]
    if not stuck or (not scene.signs.is_hang and (scene.signs.is_alive or len(stuck[0].activities) < 2)):
        return None
    named = stuck if len(group) == 1 or len(stuck) < len(group) else []
    return _finding(
        scene, "own_work", named, group, kind="rank_stuck" if named else None, ranks=_who(stuck),
        stay="stay" if len(stuck) > 1 else "stays", place=stuck[0].common or stuck[0].last.place,
        whose="their" if len(stuck) > 1 else "its", steps=_own_steps(stuck),
    )  # fmt: skip


def _all_wait(scene: Scene, layout: topology.Topology, group: Sequence[Member]) -> Finding | None:
    """Return a finding about a group in which every rank waits for another rank or for its GPU."""
    on_gpu = [one for one in group if one.last.waits == "gpu"]
    on_host = [one for one in group if one.last.waits == "ranks"]
    if on_gpu:
        past = [one for one in on_host if one.last.purpose not in _AT_A_BATCH]
        if not past:
            return _gpu_stall(scene, group)
        if len(on_gpu) <= len(on_host):
            return _finding(scene, "gpu_awaited", on_gpu, group, steps=_gpu_steps(scene, on_gpu))
        return _branched(scene, "divergence", past, group)
    if scene.signs.is_alive:
        return None
    calls = _by(group, _call)
    if len(calls) > 1:
        few = min(calls.values(), key=len)
        named = few if len(few) == 1 and len(group) > 2 and len(calls) == 2 else []
        is_batch = any(one.last.purpose in _AT_A_BATCH for one in group)
        # Neither a batch nor the exchange of new requests contains a barrier.
        is_requests = any(one.last.is_for_requests and one.last.operation != "barrier" for one in group)
        kind = "rank_divergence" if is_batch and is_requests else None
        return _branched(scene, "different_calls", named, group, kind=kind)
    nodes = layout.unseen_nodes
    missing = topology.unseen_ranks(layout, (one.process.ranks for one in group))
    is_part = 0 < len(missing) < len(group) and not nodes
    first = group[0].last
    ranks = topology.name_ranks(missing) if is_part else ""
    kind = "startup_timeout" if first.kind == "store" or first.purpose == "init" else None
    who = topology.name_nodes(nodes) or (ranks if len(missing) <= 2 else None)
    return _finding(
        scene, "same_wait", [], group, kind=kind, who=who, node=nodes[0] if nodes else None, missing=ranks,
        nodes=nodes and f"the other node{'s' * (len(nodes) > 1)}", is_whole=not nodes and not is_part,
        is_known=layout.is_known,
    )  # fmt: skip


def _weight_update(scene: Scene, group: Sequence[Member]) -> Finding:
    places = [one.last.place for one in group if one.last.purpose in _UPDATES and one.last.place]
    trainers = [one for one in scene.members if one.role in ("trainer", "") and one.last.kind != "unknown"]
    found = _finding(scene, "weight_update", [], [*group, *trainers])
    is_update = group[0].last.purpose == "weights"
    if len(places) == len(group) and (is_update or re.search("distributed|group", places[0].function)):
        found.who = "trainer"
        found.because.append(f"a member of the update's group has not joined {places[0]}: the trainer is another")
    return found


def _gpu_stall(scene: Scene, group: Sequence[Member]) -> Finding | None:
    if scene.signs.is_alive:
        return None
    layout = topology.topology_of(scene.case, group[0].process.side)
    missing = topology.unseen_ranks(layout, (one.process.ranks for one in scene.members))
    if len(missing) == 1 and len(group) > 1:
        return _finding(scene, "gpu_unseen", [], group, who=missing[0])
    kernels = signs.kernels_of(scene.case)
    component = signs.kernel_of(kernels[0])[0] if kernels else None
    row, kernel = ("gpu_kernel", kernels[0][:90]) if kernels else ("gpu_stall", "")
    return _finding(scene, row, [], group, component=component, kernel=kernel, steps=_gpu_steps(scene, group))


def _judge_pipeline(scene: Scene, layout: topology.Topology, members: Sequence[Member]) -> Finding | None:
    """Return a finding about a pipeline in which a stage waits for another stage."""
    stages = _by(members, lambda one: one.process.ranks.get("pp", 0))
    # A stage that sends waits for the next stage; a stage that receives waits for the stage before it.
    steps = {"send": 1, "recv": -1}
    waits: dict[int, set[int]] = {}
    for stage, group in stages.items():
        ahead = {steps[one.last.operation] for one in group if one.last.operation in steps}
        is_elsewhere = any(one.last.kind != "p2p" for one in group)
        waits[stage] = set() if is_elsewhere else {(stage + one) % layout.pp for one in ahead}
    if all(one.last.is_for_requests or one.last.purpose == "transfers" for one in members) and not scene.signs.is_hang:
        return None
    awaited = {other for others in waits.values() for other in others}
    # The stages that wait for no other, upstream first; in a ring every stage waits, so all of them are candidates.
    free = [stage for stage, others in sorted(waits.items()) if not others]
    roots = [stage for stage in free if stage in awaited] or free or sorted(waits)
    unseen = sorted(awaited - set(stages))
    if unseen:
        name = f"PP{unseen[0]}"
        who = topology.name_nodes(layout.unseen_nodes) or name
        return _finding(scene, "stage_unseen", [], members, who=who, stage=name)
    different = _branched(scene, "stages", [], members, is_dp_attention=layout.is_dp_attention)
    if all(waits.values()) or len(roots) > 1:
        return different
    busy = [one for one in stages[roots[0]] if one.last.kind != "p2p"]
    found_in = _judge_group(scene, layout, busy)
    if found_in is None or found_in.kind in ("symmetric_stall", "rank_divergence", "collective_mismatch"):
        # Not every release supports pipelines with DP attention; without support it fails again.
        different.restart = "no" if layout.is_dp_attention else "yes"
        return different
    found_in.who, found_in.headline = found_in.who or f"PP{roots[0]}", _standing(members)
    return found_in


def _at_work(scene: Scene, members: Sequence[Member], group: Sequence[Member]) -> Finding | None:
    kind, is_watched = members[0].last.kind, scene.case.watched is not None
    named = members if len(members) < len(group) else []
    if is_watched and all(one.rests for one in members):
        return _finding(scene, "awaited" if named else "no_progress", named, group, steps=_own_steps(members))
    if kind == "weight_load":
        shards = (float(one.groups[2] or 0) for one in scene.signs.all("shards"))
        is_slow = (scene.signs.is_hang and not is_watched) or any(secs >= _SLOW for secs in shards)
        return _finding(scene, "slow_weights" if is_slow else "weights", named, group)
    component = component_of(members[0].frames[-1]) or "compiler"
    is_ended = kind == "compile" and scene.signs.was_ended
    more = {"component": component, "deep_gemm": component == "deep_gemm", "was_ended": is_ended}
    return _finding(scene, "long_compile" if is_ended else "compile", named if is_ended else [], group, **more)


def _waits_for_a_program(scene: Scene, members: Sequence[Member], group: Sequence[Member]) -> Finding | None:
    """Return a finding about ranks that wait for another program: a store, the other side of a pair, a hub."""
    first = members[0]
    other = signs.OTHER_SIDE.get(_side(scene, members))
    if other and any("disaggregation" in frame.file for frame in first.frames[-1]):
        return _finding(scene, "pair", [], group, kind="peer_lost" if first.last.kind == "http" else None, who=other)
    named = members if len(members) < len(group) or len(group) == 1 else []
    kind, component = "rank_stuck" if named else None, component_of(first.frames[-1])
    return _finding(scene, "other_program", named, group, kind=kind, component=component, place=first.last.where)


def _side(scene: Scene, members: Sequence[Member]) -> str:
    """Return the side of a pair that ranks belong to, by their stacks if the arguments do not name it."""
    known = members[0].process.side or topology.topology_of(scene.case).side
    functions = " ".join(frame.function for frame in members[0].frames[-1])
    return known or next((side for side in signs.OTHER_SIDE if f"disagg_{side}" in functions), "")


def _judge_beside(scene: Scene, members: Sequence[Member]) -> list[Finding]:
    """Return a finding about the front end or the detokenizer, if the ranks are not the processes that hang."""
    for one in members:
        comes_round = one.is_moving and any(activity.kind == "idle" for activity in one.activities)
        is_passing = scene.signs.is_alive and (one.is_moving or len(one.frames) < 2)
        is_quiet = one.role not in ("tokenizer", "detokenizer") or one.last.kind in ("idle", "unknown", "dead")
        if is_quiet or comes_round or is_passing:
            continue
        if one.last.purpose in _UPDATES and scene.signs.is_hang:
            return [_weight_update(scene, [one])]
        work, component = front_work(one.frames[-1])
        inner = innermost(one.frames[-1])
        others = [other for other in members if other.role == "scheduler"]
        return [_finding(
            scene, f"{one.role}_beside", [one], members, component=component if one.role == "tokenizer" else None,
            doing=f"is {work}" if work else one.last.words, place=work and one.last.where,
            inner=inner if inner is not None and str(inner) != one.last.where else None,
            others=_told(others) if others else None,
        )]  # fmt: skip
    return []


def _calm(scene: Scene, members: Sequence[Member]) -> list[Finding]:
    """Return a finding if ranks only wait for requests or move: that nothing hangs, or that no work reaches them."""
    ranks = [one for one in members if one.role == "scheduler"]
    if not ranks or any(one.last.kind in ("unknown", "dead") for one in ranks):
        return []
    is_idle = all(one.last.is_for_requests for one in ranks)
    if scene.signs.is_hang or scene.signs.stands_for or (is_idle and scene.signs.is_unwell):
        silence = signs.silence_of(scene.signs, scene.case)
        if silence["kind"]:
            return [_finding(scene, "update_waits", [], members, **silence)]
        other = signs.OTHER_SIDE.get(_side(scene, ranks))
        more = {**silence, "kind": "transfer_stuck" if other else None, "who": other}
        return [_finding(scene, "no_work", [], members, **more)]
    stand = [one for one in ranks if len(one.frames) > 1 and not one.is_moving and not one.last.is_for_requests]
    if not is_idle and stand and not any(one.came_through for one in ranks):
        return []
    other = signs.OTHER_SIDE.get(_side(scene, ranks), "")
    is_alone = bool(other) and not any(other == one.process.side for one in members)
    awake = "moving" if any(one.is_moving for one in ranks) else "one_look"
    row = awake if not is_idle else "idle_alone" if is_alone else "idle"
    return [_finding(scene, row, [], members, ranks=_who(ranks), other=other)]


# -- findings and their text


def _finding(scene: Scene, row: str, named: Sequence[Member], group: Sequence[Member], **values: Any) -> Finding:
    """Return a finding with the activities of a group as evidence, and as its headline if the row has none."""
    subject = named or group
    because = [f"{_told(some)} ({some[0].stacks[-1].source or 'stacks'})" for some in _alike(group)][:_MAX_BECAUSE]
    defaults: dict[str, Any] = {
        "who": _who(named) if named else None,
        "standing": _standing(group, named),
        "pid": next((one.process.pid for one in subject if one.process.pid), None),
    }
    found = finding_of(row, scene.where, [*because, *scene.signs.told[:2]], **{**defaults, **values})
    found.component = found.component or _component(subject)
    found.headline = found.headline or defaults["standing"]
    return found


def _branched(scene: Scene, row: str, named: Sequence[Member], group: Sequence[Member], **values: Any) -> Finding:
    places = dict.fromkeys(bare(one.last.place.function) for one in group if one.last.place)
    told = " against ".join(f"`{one}`" for one in [*places][:3])
    steps = steps_of("branch", places=told, hicache=scene.case.arguments.get("enable_hierarchical_cache"))
    return _finding(scene, row, named, group, steps=steps, **values)


def _component(members: Sequence[Member]) -> str | None:
    for one in members:
        frames = one.frames[-1]
        if one.last.waits in ("ranks", "gpu") and one.last.place in frames:
            # The caller tells more than the wrappers that pass the call on.
            frames = frames[frames.index(one.last.place) :]
        if found := component_of(frames):
            return found
    return None


def _who(members: Sequence[Member]) -> str:
    return topology.name_ranks([one.name for one in members])


def _alike(members: Sequence[Member]) -> list[list[Member]]:
    """Return the members grouped by activity, the smallest group first."""
    return sorted(_by(members, lambda one: one.last.words).values(), key=len)


def _told(members: Sequence[Member]) -> str:
    """Return members and their activities as text without a full stop; beyond `_MAX_TOLD` groups only their number."""
    plurals, groups = load("activities")["plurals"], _alike(members)
    parts = []
    for some in groups[:_MAX_TOLD]:
        words = some[0].last.words
        if len(some) > 1:
            verb, _, rest = words.partition(" ")
            words = f"{plurals.get(verb, verb)} {rest}".replace(" its ", " their ").replace(" a launch", " launches")
        is_all = len(some) == len(members) > 2 and some[0].process.ranks
        parts.append(f"{f'all {len(some)} ranks' if is_all else _who(some)} {words}")
    if len(groups) > _MAX_TOLD:
        parts.append(f"{sum(len(some) for some in groups[_MAX_TOLD:])} more are elsewhere")
    return "; ".join(parts)


def _standing(group: Sequence[Member], named: Sequence[Member] = ()) -> str:
    """Return the activities of a group as text, the named members first."""
    if not named:
        return _told(group)[:_MAX_HEADLINE]
    others = [one for one in group if one not in named]
    return (f"{_told(named)}, while {_told(others)}" if others else _told(named))[:_MAX_HEADLINE]


def _by(members: Iterable[Member], key: Callable[[Member], _Key]) -> dict[_Key, list[Member]]:
    found: dict[_Key, list[Member]] = {}
    for one in members:
        found.setdefault(key(one), []).append(one)
    return found


def _call(member: Member) -> tuple[str, str]:
    """Return a key that is equal for ranks in the same wait."""
    activity = member.last
    if activity.purpose in _AT_A_BATCH:
        # Ranks may be at different places of a batch while their GPUs work; no batch contains a barrier.
        return activity.operation if activity.operation == "barrier" else "", "batch"
    frame = activity.place or activity.leaf
    return activity.operation or activity.kind, activity.purpose or (bare(frame.function) if frame else "")


# -- steps


def _own_steps(members: Sequence[Member]) -> list[str]:
    first = members[0]
    own = [f"`{bare(frame.function)}`" for frame in first.frames[-1] if is_own(frame) and not is_loop(frame)]
    return steps_of("own", pid=first.process.pid or None, name=first.name, functions=" and ".join(own[:2]))


def _gpu_steps(scene: Scene, members: Sequence[Member]) -> list[str]:
    kernels = signs.kernels_of(scene.case)
    pid = next((one.process.pid for one in members if one.process.pid), None)
    return steps_of("gpu", pid=pid, is_known=bool(kernels), known=signs.kernel_of(kernels[0])[1] if kernels else [])
