"""What does not come back: hangs and slowness, and the calm states that look like them.

Two kinds of evidence: stacks, which say where each process stands (`_judge_stacks`), and words of a log, which say who
waited too long, and what goes on meanwhile (`signs`). Who is named: of a group, the members that are elsewhere while
the others wait; of a pipeline, the upstream-most stage that waits for no stage before it; of an update of weights, the
trainer; of a pair, the other side; of several nodes, those that are not seen. Where all are in the same wait, no rank
is named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

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
    of_frames,
    role_by,
)
from sglang_crashkit.judge.components import component_of, way_out
from sglang_crashkit.judge.finding import Finding
from sglang_crashkit.model.case import Case, Process
from sglang_crashkit.model.event import Stack
from sglang_crashkit.model.sample import Frame, Thread
from sglang_crashkit.model.verdict import Helps

_Key = TypeVar("_Key")
#: Shares of a CPU below which a process that wants to run is starved, and above which it is busy.
_STARVED, _BUSY = 0.1, 0.5
_MAX_HEADLINE, _MAX_TOLD, _MAX_BECAUSE = 290, 3, 6
_PLURALS = {"waits": "wait", "is": "are", "compiles": "compile", "loads": "load", "runs": "run", "sleeps": "sleep"}
_PLURALS |= {"writes": "write", "has": "have"}
_OTHER_SIDE = {"prefill": "decode", "decode": "prefill"}
_SAME_WAIT = frozenset({"symmetric_stall", "gpu_stall", "collective_mismatch", "no_progress"})
_UPDATES = frozenset({"weights", "pause"})
_HELD = frozenset({"stopped_process", "starved_process", "stuck_in_kernel", "slow_storage"})
#: What a rank does between batches, or at any of them, wherever in the model it is.
_AT_A_BATCH = frozenset({"batch", "speculative", "sampling", "graphs", "schedule", "warmup"})


class Member(msgspec.Struct, kw_only=True):
    """One process, and what its samples show, in order of time."""

    process: Process
    name: str
    role: str
    stacks: list[Stack]
    activities: list[Activity]
    frames: list[tuple[Frame, ...]]

    @property
    def last(self) -> Activity:
        """What it did last, in a sample that shows anything."""
        return next((one for one in reversed(self.activities) if one.kind != "unknown"), self.activities[-1])

    @property
    def ranks(self) -> dict[str, int]:
        """Its ranks, by lower-case name."""
        return self.process.ranks

    @property
    def pid(self) -> int:
        """Its process id; 0 where it is not known."""
        return self.process.pid

    @property
    def server(self) -> str:
        """What tells its server from others of the same side; empty where that is not known."""
        sample = self.stacks[-1].sample
        return sample.rendezvous or (f"{sample.host} {sample.server}" if sample.server else "")

    def always(self, *kinds: str) -> bool:
        """Return whether it was in one of these states in each sample."""
        return all(one.kind in kinds for one in self.activities)

    @property
    def is_moving(self) -> bool:
        """Whether its samples show different functions."""
        return len({tuple((one.function, one.file) for one in frames) for frames in self.frames if frames}) > 1

    @property
    def common(self) -> Frame | None:
        """The innermost call that all samples have in common."""
        found = None
        for level in zip(*(reversed(frames) for frames in self.frames if frames), strict=False):
            if any((one.function, one.file) != (level[0].function, level[0].file) for one in level):
                break
            found = level[-1]
        return found

    @property
    def goes_on(self) -> bool:
        """Whether its samples show that it comes round in its loop."""
        return self.is_moving and (self.common is None or not is_own(self.common) or is_loop(self.common))

    @property
    def cpu_share(self) -> float | None:
        """How many CPUs it used between its first and its last sample; None where that is not known."""
        first, last = self.stacks[0].sample, self.stacks[-1].sample
        seconds = last.time - first.time
        # In a shorter time no clock tick may fall.
        return (last.cpu_secs - first.cpu_secs) / seconds if seconds >= 1.0 and last.cpu_secs else None


class Scene(msgspec.Struct, kw_only=True):
    """A case, as this module asks of it."""

    case: Case
    members: list[Member]
    signs: signs.Signs

    def where(self) -> tuple[float, int]:
        """Return the place of the first sign that something does not go on."""
        return self.signs.where or (self.case.last_at, max((one.order for one in self.case.events), default=0))


def find_stalls(case: Case) -> list[Finding]:
    """Return what explains that a process makes no progress, and the calm states that look like it."""
    if not watched.is_stalled(case):
        said = [*watched.compare(case), *watched.conclude(case)]
        return [*said, *signs.judge(signs.read(case), case)]
    scene = Scene(case=case, members=_members(case), signs=signs.read(case))
    found = _judge_stacks(scene)
    if case.watched is None or not any(one.weight >= 40 for one in found):
        found += signs.judge(scene.signs, case)
    if case.watched is None and not any(one.weight >= 40 for one in found):
        found += signs.judge_silence(scene.signs, case)
    if not any(one.weight >= 40 for one in found):
        found += watched.conclude(case, scene.where())
    for one in found:
        # A wait that everybody passes says nothing of its part; nor does what the kernel holds.
        is_seen = one.kind != "symmetric_stall"
        if (
            one.weight >= 60
            and one.kind not in _HELD
            and (step := way_out(one.component, case.arguments, is_seen=is_seen))
        ):
            one.next.insert(2, step)
    return found


def _members(case: Case) -> list[Member]:
    """Return the processes with stacks; samples of one process that several files hold come together."""
    found: dict[tuple[object, ...], list[tuple[Process, Stack]]] = {}
    # Not every tool says which rank a process is.
    known = {
        (one.sample.host, one.sample.pid): process
        for process in case.schedulers
        if process.ranks
        for one in process.stacks
    }
    for seen_in in case.processes.values():
        for stack in seen_in.stacks:
            if any(one.fatal for one in seen_in.stacks):
                continue  # what a process was in when it died
            sample = stack.sample
            process = (known.get((sample.host, sample.pid)) if sample.pid else None) or seen_in
            pid, who = sample.pid or process.pid, process.who or sample.title
            key = (process.side, sample.host, who, pid) if pid else (process.side, process.node, process.who)
            found.setdefault(key, []).append((process, stack))
    members = []
    for seen in found.values():
        process = seen[0][0]
        stacks = sorted((stack for _process, stack in seen), key=lambda one: (one.sample.time or one.at, one.order))
        frames = [frames_of(one.sample) for one in stacks]
        role = process.role or next((by for one in frames if (by := role_by(one))), "")
        members.append(
            Member(
                process=process,
                name=topology.short_name(process) if process.ranks else process.who or role,
                role=role,
                stacks=stacks,
                activities=[activity_of(one.sample) for one in stacks],
                frames=frames,
            )
        )
    for role, alike in _by(members, lambda one: one.role).items():
        for one in alike:
            if one.ranks or (len(alike) > 1 and one.name not in ("", role)):
                continue
            one.name = role if role and len(alike) == 1 else f"pid {one.pid}" if one.pid else one.name or "a process"
    if len({one.stacks[-1].sample.host for one in members} - {""}) > 1:
        for one in members:
            one.name = f"{one.name} on {one.stacks[-1].sample.host}"
    for alike in _by(members, lambda one: (one.process.side, one.name)).values():
        if len(alike) > 1 and alike[0].server:
            for one in alike:
                one.name = f"{one.name} (pid {one.pid})"
    return members


# -- what stacks tell


def _judge_stacks(scene: Scene) -> list[Finding]:
    members = scene.members
    if held := _held(scene, members):
        return [held]
    if watched.waited_in_vain(scene.case):
        return watched.conclude(scene.case, scene.where())
    if (pid := watched.beside_ranks(scene.case)) is not None:
        return _judge_beside(scene, [one for one in members if one.role == "scheduler" or one.pid == pid])
    if compared := watched.compare(scene.case, scene.where()):
        return compared
    ranks = [one for one in members if one.role == "scheduler"] or [
        one for one in members if not one.role and any(map(is_own, one.frames[-1]))
    ]
    found = []
    for (side, _server), some in _by(ranks, lambda one: (one.process.side, one.server)).items():
        found += _judge_ranks(scene, side, some)
    if not found or found[0].kind in _SAME_WAIT:
        # A recorder knows who is behind, where the stacks show the same wait.
        found = watched.compare_waits(scene.case, scene.where()) or found
    if any(one.weight >= 40 for one in found):
        return found
    return [*_judge_beside(scene, members), *found] or _calm(scene, members)


def _held(scene: Scene, members: Sequence[Member]) -> Finding | None:
    """Return what the kernel's state of a process says by itself."""
    important = [one for one in members if one.role in ("scheduler", "tokenizer", "detokenizer", "controller", "")]
    ranks = [one for one in members if one.role == "scheduler"]
    stopped = [one for one in important if one.last.kind in ("stopped", "traced")]
    if stopped:
        steps = [f"`kill -CONT {one.pid}` lets {one.name} go on" for one in stopped[:2] if one.pid]
        steps.append("find who stopped it: a debugger, a checkpoint tool, `docker pause`, the cgroup's freezer")
        return _finding(
            scene,
            "stopped_process",
            stopped,
            _with(ranks, stopped),
            level="established",
            restart="yes",
            steps=steps,
            weight=100,
        )
    asleep = [one for one in important if one.always("disk_sleep") and (len(one.activities) > 1 or one.last.detail)]
    if asleep:
        first = asleep[0]
        loads = any(one.kind == "weight_load" for one in first.activities) or any(
            bare(frame.function).startswith("load_") for frames in first.frames for frame in frames
        )
        steps = [
            f"`cat /proc/{first.pid or 'PID'}/stack` as root, and `dmesg -T`, name the file system or the driver",
            "look at the storage or the network mount that it reads from; SIGKILL ends it only when the kernel returns",
        ]
        kind = "slow_storage" if loads else "stuck_in_kernel"
        return _finding(
            scene, kind, asleep, _with(ranks, asleep), steps=steps, weight=90, component="storage" if loads else None
        )
    for one in important:
        share = one.cpu_share
        runs = all(stack.sample.state == "R" for stack in one.stacks)
        if share is not None and share < _STARVED and runs and len(one.stacks) > 1:
            steps = ["`cat /sys/fs/cgroup/cpu.stat` (nr_throttled) and `cat /proc/pressure/cpu`: give it more CPUs"]
            return _finding(scene, "starved_process", [one], _with(ranks, [one]), steps=steps)
    return None


def _with(ranks: Sequence[Member], others: Sequence[Member]) -> list[Member]:
    """Return the ranks and these other processes; what the rest of the front end does meanwhile tells nothing."""
    return [*ranks, *(one for one in others if one not in ranks)]


def _judge_ranks(scene: Scene, side: str, members: Sequence[Member]) -> list[Finding]:
    is_going = any(one.goes_on for one in members) and all(one.goes_on or one.last.is_for_requests for one in members)
    if is_going and not scene.signs.is_hang:
        return []
    layout = topology.topology_of(scene.case, side, (one.ranks for one in members))
    groups = topology.groups_of(layout, members, lambda one: one.ranks)
    if layout.pp > 1 and any(one.last.kind == "p2p" for one in members):
        of_pipeline = _judge_pipeline(scene, layout, members)
        return [of_pipeline] if of_pipeline else []
    found = [one for group in groups if (one := _judge_group(scene, layout, group)) is not None]
    return sorted(found, key=lambda one: -one.weight)[:1]


def _judge_group(scene: Scene, layout: topology.Topology, group: Sequence[Member]) -> Finding | None:
    """Return what is seen of ranks that work together; None where they wait for requests, or nothing is seen."""
    if all(one.last.is_for_requests for one in group) and _is_idle(scene, group):
        return None
    updating = [one for one in group if one.last.purpose in _UPDATES and not one.last.is_work]
    if scene.signs.is_hang and updating and all(one in updating or one.last.is_for_requests for one in group):
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
        steps = _branch_steps(scene, group)
        return _finding(
            scene, "rank_divergence", idle if len(idle) < len(waiting) else [], group, steps=steps, weight=70
        )
    if len(awaited) > 1 and len(awaited) > len(waiting):
        return _none_waits(scene, awaited, group)
    return _awaited(scene, awaited, group)


def _is_idle(scene: Scene, group: Sequence[Member]) -> bool:
    """Return whether ranks that wait for requests are idle, and do not hang there."""
    is_polling = any(one.last.kind in ("idle", "socket", "own", "gil") for one in group)
    first_is_seen = any(one.ranks.get("tp", 0) == 0 for one in group)
    if is_polling:
        return True
    # The first rank gets the requests: where it waits in the broadcast too, others have not come to it.
    return not scene.signs.is_hang and (not first_is_seen or scene.signs.is_alive or len(group) == 1)


def _awaited(scene: Scene, awaited: Sequence[Member], group: Sequence[Member]) -> Finding | None:
    """Return what is said of members that are elsewhere while the others wait for them."""
    first = awaited[0].last
    if scene.signs.is_alive and not first.is_work:
        return None  # what one look at a server that serves shows
    if first.is_work and (not scene.signs.was_ended or first.kind == "weight_load"):
        return _at_work(scene, awaited, group)
    if first.kind in ("storage", "http", "transfer"):
        return _elsewhere(scene, awaited, group)
    kind = "driver_stuck" if first.kind == "driver" and len(awaited) > 1 else "rank_stuck"
    return _finding(scene, kind, awaited, group, steps=_own_steps(awaited), weight=70)


def _none_waits(scene: Scene, members: Sequence[Member], group: Sequence[Member] | None = None) -> Finding | None:
    """Return what is said of ranks none of which waits for another."""
    group = group or members
    kinds = _by(members, lambda one: one.last.kind)
    kind, most = max(kinds.items(), key=lambda item: len(item[1]))
    if kind in ("unknown", "dead"):
        return None
    if 2 * len(most) <= len(members) and len(members) > 1:
        return _no_progress(scene, group)
    if kind == "driver":
        steps = _driver_steps(most)
        return _finding(
            scene,
            "driver_stuck",
            most if len(group) == 1 else [],
            group,
            steps=steps,
            weight=80,
            restart="no",
            component="driver",
        )
    if kind in ("compile", "weight_load", "profile"):
        return _at_work(scene, most, group)
    if kind in ("transfer", "http", "storage"):
        return _elsewhere(scene, most, group)
    if kind == "idle":
        return None
    if kind == "build_lock":
        steps = ["`fuser -v FILE` on the lock's file: remove it where no process holds it, and start again"]
        return _finding(scene, "startup_lock", [], group, steps=steps, component="compiler", weight=60)
    if kind == "own":
        return _own_work(scene, most, group)
    return _no_progress(scene, group)


def _own_work(scene: Scene, members: Sequence[Member], group: Sequence[Member]) -> Finding | None:
    """Return what is said of ranks that run Python code of their own."""
    stuck = [one for one in members if not one.is_moving or ((own := one.common) and is_own(own) and not is_loop(own))]
    if not stuck or (not scene.signs.is_hang and (scene.signs.is_alive or len(stuck[0].activities) < 2)):
        return None
    place = stuck[0].common or stuck[0].last.place
    words = f"stay below {place}" if len(stuck) > 1 else f"stays below {place}"
    named = stuck if len(group) == 1 or len(stuck) < len(group) else []
    kind = "rank_stuck" if named else "own_work"
    steps = [*_own_steps(stuck)]
    headline = f"{_who(stuck)} {words}, in Python code of {'its' if len(stuck) == 1 else 'their'} own that does not end"
    found = _finding(scene, kind, named, group, steps=steps, weight=70)
    found.headline = headline[:_MAX_HEADLINE]
    found.cause = "own Python work that does not end"
    return found


def _all_wait(scene: Scene, layout: topology.Topology, group: Sequence[Member]) -> Finding | None:
    """Return what is said of a group all of which wait for another rank or for their GPU."""
    on_gpu = [one for one in group if one.last.waits == "gpu"]
    on_host = [one for one in group if one.last.waits == "ranks"]
    if not on_host:
        return _gpu_stall(scene, group)
    if on_gpu:
        past = [one for one in on_host if one.last.purpose not in _AT_A_BATCH]
        if not past:
            return _gpu_stall(scene, group)
        if len(on_gpu) <= len(on_host):
            return _finding(scene, "rank_stuck", on_gpu, group, steps=_gpu_steps(scene, on_gpu), weight=70)
        return _finding(scene, "rank_divergence", past, group, steps=_branch_steps(scene, group), weight=70)
    calls = _by(group, _call)
    is_update = [one for one in group if one.last.purpose in _UPDATES]
    if is_update and all(one in is_update or one.last.is_for_requests for one in group):
        return _weight_update(scene, group)
    if len(calls) > 1 and (scene.signs.is_hang or not scene.signs.is_alive):
        few = min(calls.values(), key=len)
        named = few if len(few) == 1 and len(group) > 2 and len(calls) == 2 else []
        is_batch = any(one.last.purpose in _AT_A_BATCH for one in group)
        is_requests = any(one.last.is_for_requests for one in group)
        kind = "rank_divergence" if is_batch and is_requests else "collective_mismatch"
        return _finding(scene, kind, named, group, steps=_branch_steps(scene, group), weight=70, restart="yes")
    if scene.signs.is_alive and not scene.signs.is_hang:
        return None
    return _symmetric(scene, layout, group)


def _symmetric(scene: Scene, layout: topology.Topology, group: Sequence[Member]) -> Finding | None:
    """Return what is said of a group all of which wait in the same call."""
    seen = [one.ranks for one in group]
    nodes = topology.unseen_nodes(layout, (one.ranks for one in scene.members if one.role == "scheduler"))
    missing = topology.unseen_ranks(layout, seen) if len(layout_ranks(layout, group)) <= 64 else []
    first = group[0].last
    kind = "startup_timeout" if first.kind == "store" or first.purpose == "init" else "symmetric_stall"
    who, steps = None, []
    if nodes:
        who = topology.name_nodes(nodes)
        steps = [
            f"take the stacks on {who}, the other node{'s' * (len(nodes) > 1)}, at the same time: its ranks are not"
            " seen here, and these here wait for one of them",
            f"read the log of {who} (--node-rank {nodes[0]}) around the last batch",
        ]
    elif missing and len(missing) < len(group):
        names = [" ".join(f"{axis.upper()}{number}" for axis, number in reversed(one.items())) for one in missing]
        who = topology.name_ranks(names) if len(names) <= 2 else None
        steps = [f"look at {topology.name_ranks(names)}: no stack of it is here, and the others wait for it"]
    else:
        steps = [
            "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 at the next start leaves a flight recorder dump that names the operation"
        ]
    if not layout.is_known:
        steps.append(topology.OTHER_NODES)
    found = _finding(scene, kind, [], group, steps=steps, weight=60)
    found.who = who
    if who:
        found.headline = f"{found.headline}; {who} is not seen"[:_MAX_HEADLINE]
    return found


def layout_ranks(layout: topology.Topology, group: Sequence[Member]) -> range:
    """Return as many numbers as the layout has ranks, at least those that are seen."""
    return range(max(layout.ranks, len(group)))


def _weight_update(scene: Scene, group: Sequence[Member]) -> Finding:
    places = [one.last.place for one in group if one.last.purpose in _UPDATES and one.last.place]
    place = places[0] if places else None
    trainers = [one for one in scene.members if one.role in ("trainer", "") and one.last.kind != "unknown"]
    joins_group = place is not None and bool(re.search(r"distributed|group", place.function))
    steps = [
        "take the trainer's stack (`py-spy dump --pid` of each training rank): which of them is not in the same call?",
        "compare the trainer's group with the engine's: master address and port, group_name, world_size, rank_offset",
        "compare the source rank (src) of each broadcast, and the order, names and number of the tensors on both sides",
    ]
    found = _finding(
        scene, "weight_update_deadlock", [], [*group, *trainers], steps=steps, weight=80, component="weight_update"
    )
    found.restart = "unknown"
    if len(places) == len(group) and (joins_group or group[0].last.purpose == "weights"):
        found.who = "trainer"
        found.because.append(f"a member of the update's group has not joined {place}: the trainer is the other member")
    return found


def _gpu_stall(scene: Scene, group: Sequence[Member]) -> Finding | None:
    if not scene.signs.is_hang and scene.signs.is_alive:
        return None
    layout = topology.topology_of(scene.case, group[0].process.side, (one.ranks for one in scene.case.schedulers))
    missing = topology.unseen_ranks(layout, (one.ranks for one in scene.members)) if layout.ranks <= 64 else []
    if len(missing) == 1 and len(group) > 1:
        found = _finding(scene, "rank_stuck", [], group, weight=70)
        found.who = " ".join(f"{axis.upper()}{number}" for axis, number in reversed(missing[0].items()))
        found.headline = f"{found.headline}; of {found.who} there is no stack"[:_MAX_HEADLINE]
        found.next = [
            f"look at {found.who} first: `grep State /proc/PID/status`; T is stopped: `kill -CONT PID`",
            f"take its stack (`py-spy dump --native --pid PID`): the others' GPUs wait for that of {found.who}",
        ]
        return found
    kernels = signs.kernels_of(scene.case)
    component = signs.component_of_kernel(kernels[0]) if kernels else None
    found = _finding(scene, "gpu_stall", [], group, steps=_gpu_steps(scene, group), weight=70, component=component)
    if kernels:
        found.headline = f"the GPUs run {kernels[0][:90]} and do not end; {found.headline}"[:_MAX_HEADLINE]
        found.cause = "the GPUs run a kernel that does not end"
    return found


def _judge_pipeline(scene: Scene, layout: topology.Topology, members: Sequence[Member]) -> Finding | None:
    """Return what is said of a pipeline, some of whose stages wait for another."""
    stages = _by(members, lambda one: topology.stage_of(one.ranks))
    waits: dict[int, set[int]] = {}
    for stage, group in stages.items():
        others = {_other_stage(layout, stage, one.last) for one in group if one.last.kind == "p2p"}
        elsewhere = [one for one in group if one.last.kind != "p2p"]
        waits[stage] = set() if elsewhere else {one for one in others if one is not None}
    if all(one.last.is_for_requests or one.last.purpose == "transfers" for one in members) and not scene.signs.is_hang:
        return None
    roots = topology.root_stages(waits)
    unseen = sorted({other for others in waits.values() for other in others} - set(stages))
    if unseen:
        found = _finding(scene, "symmetric_stall", [], members, weight=60, component="pipeline_parallel")
        nodes = topology.unseen_nodes(layout, (one.ranks for one in members))
        found.who = topology.name_nodes(nodes) if nodes else f"PP{unseen[0]}"
        found.next = [
            f"take the stacks of stage PP{unseen[0]} ({found.who}): the others wait for it, and it is not seen"
        ]
        return found
    steps = _pipeline_steps(scene, members)
    if all(waits.values()) or len(roots) > 1:
        return _finding(
            scene, "collective_mismatch", [], members, steps=steps, weight=70, component="pipeline_parallel"
        )
    group = stages[roots[0]]
    busy = [one for one in group if one.last.kind != "p2p"]
    found_in = _judge_group(scene, layout, busy)
    if found_in is None or found_in.kind in ("symmetric_stall", "rank_divergence", "collective_mismatch"):
        found = _finding(
            scene, "collective_mismatch", [], members, steps=steps, weight=70, component="pipeline_parallel"
        )
        # A combination that the release does not support fails again.
        found.restart = "no" if layout.is_dp_attention else "yes"
        return found
    found_in.who = found_in.who or f"PP{roots[0]}"
    found_in.headline = _standing(members)
    return found_in


def _other_stage(layout: topology.Topology, stage: int, activity: Activity) -> int | None:
    if activity.operation not in ("send", "recv"):
        return None
    return (stage + (1 if activity.operation == "send" else -1)) % layout.pp


def _at_work(scene: Scene, members: Sequence[Member], group: Sequence[Member]) -> Finding | None:
    """Return what is said of ranks that compile or load."""
    kind = members[0].last.kind
    is_slow = kind == "weight_load" and (scene.signs.is_hang or scene.signs.is_slow_load)
    if kind == "weight_load":
        steps = ["`iostat -x 5`, `nfsiostat 5` and `cat /proc/PID/io` show whether the weights are read, and how fast"]
        named = members if len(members) < len(group) else []
        if is_slow:
            return _finding(scene, "slow_storage", named, group, steps=steps, weight=60, component="storage")
        return _finding(scene, "busy", named, group, steps=steps, weight=30, component="model_loader")
    steps = ["wait: compiling takes minutes the first time on a host, and the cache keeps it"]
    component = component_of(members[0].frames[-1]) or "compiler"
    if component == "deep_gemm":
        steps.append("`python3 -m sglang.compile_deep_gemm` with the server's arguments compiles them before the start")
    else:
        steps.append(
            "keep the compile caches (~/.cache, TRITON_CACHE_DIR, FLASHINFER_WORKSPACE_BASE) on a volume that stays"
        )
    if kind == "compile" and scene.signs.was_ended:
        steps.append("raise --watchdog-timeout, so that a long compile does not end the server")
        return _finding(
            scene,
            "rank_stuck",
            members if len(members) < len(group) else [],
            group,
            steps=steps,
            weight=60,
            component=component,
        )
    return _finding(scene, "busy", [], group, steps=steps, weight=30, component=component, restart="no")


def _elsewhere(scene: Scene, members: Sequence[Member], group: Sequence[Member]) -> Finding | None:
    """Return what is said of ranks that wait for another program: a store, the other side of a pair, a hub."""
    first = members[0]
    other = _OTHER_SIDE.get(_side(scene, members))
    is_pair = any("disaggregation" in frame.file for frame in first.frames[-1])
    if is_pair and other:
        steps = [f"read the {other} server's log and take its stacks: does it live, and does its port answer?"]
        kind = "peer_lost" if first.last.kind == "http" else "transfer_stuck"
        found = _finding(scene, kind, [], group, steps=steps, weight=60, component="pd_transfer")
        found.who = other
        return found
    if first.last.kind == "weight_load" or any("huggingface" in frame.file for frame in first.frames[-1]):
        return _at_work(scene, members, group)
    steps = [
        f"see whether what {first.last.where} talks to answers: its address is in the arguments or the environment"
    ]
    named = members if len(members) < len(group) or len(group) == 1 else []
    component = component_of(first.frames[-1]) or "storage"
    return _finding(scene, "rank_stuck" if named else "no_progress", named, group, steps=steps, component=component)


def _side(scene: Scene, members: Sequence[Member]) -> str:
    """Return the side of a pair that ranks are of, by their stacks where the arguments do not say."""
    known = members[0].process.side or topology.topology_of(scene.case).side
    functions = " ".join(frame.function for frame in members[0].frames[-1])
    return known or next((side for side in _OTHER_SIDE if f"disagg_{side}" in functions), "")


def _no_progress(scene: Scene, group: Sequence[Member]) -> Finding | None:
    if not scene.signs.is_hang and (scene.signs.is_alive or any(one.is_moving for one in group)):
        return None
    pids = next((str(one.pid) for one in group if one.pid), "PID")
    steps = [f"`py-spy dump --native --pid {pids}` twice, some seconds apart, shows whether it moves, and in what"]
    return _finding(scene, "no_progress", [], group, steps=steps, weight=45)


def _judge_beside(scene: Scene, members: Sequence[Member]) -> list[Finding]:
    """Return what is said of the front end and the detokenizer, where the ranks are not what hangs."""
    for one in members:
        if one.role not in ("tokenizer", "detokenizer") or one.last.kind in ("idle", "unknown", "dead"):
            continue
        if one.is_moving and any(activity.kind == "idle" for activity in one.activities):
            continue
        stays = len(one.frames) > 1 and not one.is_moving
        if not scene.signs.is_hang and scene.signs.is_alive and not stays:
            continue
        if one.last.purpose in _UPDATES and scene.signs.is_hang:
            return [_weight_update(scene, [one])]
        work, component = front_work(one.frames[-1])
        doing = f"is {work}" if work else one.last.words
        where = f" in {one.last.where}" if work and one.last.where else ""
        inner = innermost(one.frames[-1])
        if inner is not None and str(inner) != one.last.where:
            where += f", innermost in {inner}"
        others = [other for other in members if other.role == "scheduler"]
        calm = f", while {_told(others)}" if others else ""
        if one.role == "tokenizer":
            headline = f"the main process {doing} on its event loop{where}{calm}"
            steps = [
                "raise --tokenizer-worker-num: tokenizer workers take this off the event loop that answers /health",
                "give the liveness probe more time (timeoutSeconds, failureThreshold): the engine behind it works",
                "bound the length of prompts and the number of images at the gateway",
            ]
        else:
            headline = f"the detokenizer {doing}{where} and does not come to its next message{calm}"
            steps = [
                f"`py-spy dump --pid {one.pid or 'PID'}` twice shows whether it moves; see what request it works at"
            ]
        found = _finding(scene, f"{one.role}_stuck", [one], members, steps=steps, weight=70)
        found.headline = headline[:_MAX_HEADLINE]
        found.component = "detokenizer" if one.role == "detokenizer" else component or "tokenizer"
        return [found]
    return []


def _calm(scene: Scene, members: Sequence[Member]) -> list[Finding]:
    """Return that nothing hangs, where ranks wait for requests or move."""
    ranks = [one for one in members if one.role == "scheduler"]
    if not ranks or any(one.last.kind in ("unknown", "dead") for one in ranks):
        return []
    if scene.signs.is_hang or scene.signs.stands_for:
        found = _finding(scene, "no_progress", [], members, weight=45, component=scene.signs.part)
        if beside := _other_threads(ranks):
            found.component = beside[0]
            found.headline = f"{beside[1]}; {found.headline}"[:_MAX_HEADLINE]
            found.next = ["the thread that does not come back is beside the main one: see what it reads or waits for"]
            return [found]
        word = scene.signs.last_word
        told = f"the last thing in its log: {word}" if word else "no request reaches them, or no answer comes back"
        found.headline = f"{found.headline}; {told}"[:_MAX_HEADLINE]
        found.next = [
            "`py-spy dump --pid PID` of the main process and of the detokenizer: the schedulers only wait for work"
        ]
        if other := _OTHER_SIDE.get(_side(scene, ranks)):
            found.who, found.kind = other, "transfer_stuck"
            found.next = [f"take the stacks and the log of the {other} side: these ranks here wait for work"]
        if signs.is_of_update(scene.signs):
            found.who, found.kind, found.next = None, "weight_update_deadlock", signs.steps_of_update(scene.case)
        return [found]
    is_idle = all(one.last.is_for_requests for one in ranks)
    if not is_idle and any(len(one.frames) > 1 and not one.is_moving and not one.last.is_for_requests for one in ranks):
        return []
    words = "wait for requests, as an idle server does" if is_idle else "move between their samples"
    found = _finding(scene, "no_incident" if is_idle else "busy", [], members, weight=20)
    found.headline = f"nothing is wrong: the schedulers ({_who(ranks)}) {words}"
    return [found]


def _other_threads(members: Sequence[Member]) -> tuple[str | None, str] | None:
    """Return the part and the words of threads beside the main one that are at work or wait for something outside."""
    for one in members:
        sample = one.stacks[-1].sample
        for thread in sample.threads:
            if thread.frames == one.frames[-1] or not any(map(is_own, thread.frames)):
                continue
            activity = of_frames(thread.frames)
            if activity.kind in ("storage", "http", "file", "transfer") or (activity.kind == "own" and _is_io(thread)):
                words = f"a thread of {one.name} ({thread.name}) {activity.words}"
                return component_of(thread.frames, thread=thread.name), words
    return None


def _is_io(thread: Thread) -> bool:
    return bool(re.search(r"(?i)\b(io|aux|prefetch|backup|transfer|load|storage)", thread.name.replace("_", " ")))


# -- in words


def _finding(
    scene: Scene,
    kind: str,
    named: Sequence[Member],
    group: Sequence[Member],
    *,
    level: str = "supported",
    restart: Helps | None = None,
    component: str | None = None,
    steps: Iterable[str] = (),
    weight: int = 60,
) -> Finding:
    """Return a finding of a group, with what each of it does."""
    subject = named or group
    component = component or _component(subject)
    because = [f"{_told(some)} ({some[0].stacks[-1].source or 'stacks'})" for some in _alike(group)][:_MAX_BECAUSE]
    return Finding(
        kind=kind,
        level="established" if level == "established" else "supported",
        who=_who(named) if named else None,
        component=component,
        restart=restart,
        headline=_standing(group, named),
        because=[*because, *scene.signs.told[:2]],
        next=list(steps),
        where=scene.where(),
        weight=weight,
    )


def _component(members: Sequence[Member]) -> str | None:
    for one in members:
        frames = one.frames[-1] if one.frames else ()
        if one.last.waits in ("ranks", "gpu") and one.last.place in frames:
            # Who made the call tells more than what passes it on.
            frames = frames[frames.index(one.last.place) :]
        if found := component_of(frames):
            return found
    return None


def _who(members: Sequence[Member]) -> str:
    return topology.name_ranks([one.name for one in members])


def _alike(members: Sequence[Member]) -> list[list[Member]]:
    """Return the members by what they do, the fewest first."""
    return sorted(_by(members, lambda one: one.last.words).values(), key=len)


def _told(members: Sequence[Member]) -> str:
    """Return who does what, of members that do the same, as a sentence without a full stop; several kinds shortened."""
    groups = _alike(members)
    parts = []
    for some in groups[:_MAX_TOLD]:
        words = some[0].last.words
        if len(some) > 1:
            verb, _, rest = words.partition(" ")
            words = f"{_PLURALS.get(verb, verb)} {rest}".replace(" its ", " their ").replace(" a launch", " launches")
        who = f"all {len(some)} ranks" if len(some) == len(members) > 2 and some[0].ranks else _who(some)
        parts.append(f"{who} {words}")
    if len(groups) > _MAX_TOLD:
        parts.append(f"{sum(len(some) for some in groups[_MAX_TOLD:])} more are elsewhere")
    return "; ".join(parts)


def _standing(group: Sequence[Member], named: Sequence[Member] = ()) -> str:
    """Return where everybody stands, those that are named first."""
    if not named:
        return _told(group)[:_MAX_HEADLINE]
    ids = {id(one) for one in named}
    others = [one for one in group if id(one) not in ids]
    return (f"{_told(named)}, while {_told(others)}" if others else _told(named))[:_MAX_HEADLINE]


def _by(members: Iterable[Member], key: Callable[[Member], _Key]) -> dict[_Key, list[Member]]:
    found: dict[_Key, list[Member]] = {}
    for one in members:
        found.setdefault(key(one), []).append(one)
    return found


def _call(member: Member) -> tuple[str, str]:
    """Return what is equal for ranks that are in the same wait."""
    activity = member.last
    if activity.purpose in _AT_A_BATCH:
        # Where ranks are in a batch differs, as their GPUs work on; no batch has a barrier.
        return activity.operation if activity.operation == "barrier" else "", "batch"
    operation, function, _file = activity.call
    return (operation, activity.purpose or function)


# -- steps


def _branch_steps(scene: Scene, group: Sequence[Member]) -> list[str]:
    places = list(dict.fromkeys(bare(one.last.place.function) for one in group if one.last.place))[:3]
    told = " against ".join(f"`{one}`" for one in places)
    steps = [
        f"search upstream's issues for {told}, and upgrade to a newer release: SGLang chose different branches",
        "compare the last lines of each rank's log before the stop: the first that differ (queue, abort) are the cause",
    ]
    if scene.case.arguments.get("enable_hierarchical_cache"):
        steps.append("start without --enable-hierarchical-cache: its events are decided by each rank alone")
    return steps


def _own_steps(members: Sequence[Member]) -> list[str]:
    first = members[0]
    pid = str(first.pid or "PID")
    names = (
        [bare(frame.function) for frame in first.frames[-1] if is_own(frame) and not is_loop(frame)][:2]
        if first.frames
        else []
    )
    steps = [f"`py-spy dump --native --pid {pid}` of {first.name}, twice, shows whether it moves, and in what"]
    if names:
        steps.append(
            f"search upstream's issues for {' and '.join(f'`{one}`' for one in names)}: does a newer release change it?"
        )
    return steps


def _driver_steps(members: Sequence[Member]) -> list[str]:
    operation = members[0].last.operation
    steps = []
    if "Module" in operation or "Library" in operation or "Kernel" in operation or operation.startswith("_init"):
        steps.append("CUDA_MODULE_LOADING=EAGER loads all kernels at start: a lazy load waits for the kernels that run")
        steps.append("warm up each path before it serves (speculative decoding, the longest batch, each graph size)")
    steps.append(f"`cuda-gdb -p {members[0].pid or 'PID'} -batch -ex 'info cuda kernels'` shows what holds the GPU")
    return steps


def _gpu_steps(scene: Scene, members: Sequence[Member]) -> list[str]:
    pid = str(next((one.pid for one in members if one.pid), "PID"))
    kernels = signs.kernels_of(scene.case)
    steps = signs.steps_of_kernel(kernels[0]) if kernels else []
    if not kernels:
        steps.append(f"`cuda-gdb -p {pid} -batch -ex 'info cuda kernels'` names the kernel that runs, while it hangs")
    steps.append("`nvidia-smi` on each GPU: 100 % use with low power is a kernel that spins for another GPU")
    steps.append("without the graph (--disable-cuda-graph) and with CUDA_LAUNCH_BLOCKING=1 the stack names the launch")
    return steps


def _pipeline_steps(scene: Scene, members: Sequence[Member]) -> list[str]:
    layout = topology.topology_of(scene.case, members[0].process.side, (one.ranks for one in members))
    steps = ["the stages are in different operations: run without pipeline parallelism (--pp-size 1, more --tp-size)"]
    if layout.is_dp_attention:
        steps.append("or take out --enable-dp-attention: with --pp-size above 1 not every release supports it")
    return [*steps, *_branch_steps(scene, members)]
