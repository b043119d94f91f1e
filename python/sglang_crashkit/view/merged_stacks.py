"""The stacks of all processes of an incident as trees for an icicle, each node with the set of ranks in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_crashkit.analysis.ranks import Rank, RankSet, rank_at, scope_of
from sglang_crashkit.analysis.stack_tree import Node, PrefixTree, format_tree
from sglang_crashkit.model.checked_json import mappings_of, texts_of
from sglang_crashkit.model.incident import EvidenceKind, Incident
from sglang_crashkit.model.sample import Frame
from sglang_crashkit.view.files import IncidentFiles, cut

#: A tree of more nodes is cut at those of the deepest calls, and at those that are thinner, in percent.
_MAX_NODES, _MAX_DEPTH, _THINNEST = 4000, 200, 0.12
#: Of more calls in a row the inner ones are drawn as one.
_LONGEST_RUN = 6
_MAX_FRAMES, _MAX_THREADS, _MAX_LINE = 400, 2000, 1000
#: Characters of an enumeration of ranks.
MAX_NAMES = 60
#: So many sets of ranks of a tree are told.
_MAX_SETS = 24
#: Evidence with stacks, the one that tells most of a process that failed first.
_KINDS: tuple[EvidenceKind, ...] = ("fault_stack", "stack")
_KIT = "sglang_crashkit/"


@dataclass(frozen=True)
class Stack:
    """A stack of one rank."""

    rank: Rank  # whose it is
    scheduler: bool  # it is a scheduler's
    main: bool  # it is of the main thread, or of what stands for it
    frames: tuple[Frame, ...]  # innermost first


def ranks_by_pid(incident: Incident) -> dict[int, Rank]:
    """Return the place of each process of an incident among all."""
    found: dict[int, Rank] = {}
    seen: dict[str, int] = {}
    for process in incident.processes:
        if process.is_rank:
            axes = {axis: number for axis, number in process.rank.items() if 0 <= number < 1 << 20}
            found[process.pid] = rank_at(axes)
        else:
            role = process.role
            number = seen[role] = seen.get(role, -1) + 1
            found[process.pid] = Rank(scope_of({"role": f"{role} {number + 1}" if number else role}), "", 0)
    return found


def read_stacks(incident: Incident, files: IncidentFiles) -> Iterator[Stack]:
    """Yield the Python stacks of the processes of an incident; of one that raised, what it did then."""
    ranks = ranks_by_pid(incident)
    for process in incident.processes:
        rank = ranks[process.pid]
        paths = {one.kind: one.path for one in reversed(process.evidence)}
        raised = files.read_object(paths.get("exception")).get("traceback")
        frames = tuple(map(_frame_of, reversed(texts_of(raised)[-_MAX_FRAMES:])))
        if frames:
            yield Stack(rank, process.is_rank, True, frames)
        path = next(filter(None, map(paths.get, _KINDS)), "")
        threads = mappings_of(files.read_object(f"{path.removesuffix('.txt')}.json").get("threads"))[:_MAX_THREADS]
        for thread in threads:
            main = thread.get("native_id") == process.pid or thread.get("name") == "MainThread"
            taken = tuple(_without_kit(_frames(thread)))
            if taken and not (main and frames):
                yield Stack(rank, process.is_rank, main, taken)
        if not threads and not frames and process.doing:
            # Of one whose files are gone, its innermost frames are left.
            yield Stack(rank, process.is_rank, True, tuple(map(_frame_of, process.doing[:_MAX_FRAMES])))


def merge(stacks: Iterable[Stack], first: Rank | None) -> list[dict[str, Any]]:
    """Return the trees of the main threads of the ranks, of all processes and of all threads, as a page draws them.

    Returns:
        Of each tree its ``name``; its ``text``; its ``sets``, each with ``colour``, ``words`` and ``size``, that of all
        first, then the `first` failure alone, then those of the fewest ranks; and ``boxes``: each with ``left`` and
        ``width`` in percent, ``depth``, ``name``, ``place``, ``colour`` and ``words``; ``height`` is how many are below
        each other.
    """
    known = list(stacks)
    alone = RankSet([first]).format() if first is not None else ""
    shown: list[dict[str, Any]] = []
    before = 0
    for name, chosen in (
        ("ranks", [one for one in known if one.main and one.scheduler]),
        ("all processes", [one for one in known if one.main]),
        ("all threads", known),
    ):
        if len(chosen) == before:
            continue
        before = len(chosen)
        tree = PrefixTree()
        for one in chosen:
            tree.add(one.rank, one.frames)
        found = {key: one.format() for key, one in tree.sets().items()}
        everybody = found[id(tree.root)]
        sizes = {one.format(): len(one) for one in tree.sets().values()}
        in_order = sorted(sizes.keys() - {everybody}, key=lambda one: (one != alone, sizes[one], one))
        # Where all are grey, the failure alone is red.
        colours = {one: f"c{2 + place % 7}" for place, one in enumerate(in_order)} | {everybody: "c0", alone: "c1"}
        sets = [
            {"colour": colours[one], "words": cut_names(one), "size": sizes[one]}
            for one in [everybody, *in_order][:_MAX_SETS]
        ]
        boxes = list(_boxes(tree, found, colours))
        text = "\n".join(cut(line, _MAX_LINE) for line in format_tree(tree))
        height = 1 + max(box["depth"] for box in boxes)
        shown.append({"name": name, "text": text, "sets": sets, "boxes": boxes, "height": height})
    return shown


def cut_names(names: str) -> str:
    """Return the beginning of a long enumeration of ranks."""
    return names if len(names) < MAX_NAMES else f"{names[:MAX_NAMES].rpartition(',')[0] or names[:MAX_NAMES]},..."


def _boxes(tree: PrefixTree, sets: Mapping[int, str], colours: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the calls from the outermost on, each as wide as there are stacks in it; those that are too thin not."""
    values = _values(tree)
    waiting, count = [(tree.root, 0.0, 100.0, 0)], 0
    for node, left, width, depth in waiting:
        # A run of calls that nothing branches from is told by its first and its last two.
        run = [node]
        while len(only := list(run[-1].in_order())) == 1 and sets[id(only[0])] == sets[id(node)]:
            run += only
        names: list[tuple[str, str]] = [(each.function or "all stacks", _place_of(each)) for each in run]
        if len(names) > _LONGEST_RUN:
            inner = " > ".join(name for name, _place in names[2:-2])
            names[2:-2] = [(f"{len(names) - 4} calls: {inner}", "")]
        count_words = f"{values[id(node)]} stack{'s' if values[id(node)] > 1 else ''} of {cut_names(sets[id(node)])}"
        at = {"left": round(left, 3), "width": round(width, 3), "colour": colours[sets[id(node)]], "words": count_words}
        for row, (name, place) in enumerate(names):
            yield at | {"depth": depth + row, "name": cut(name, 400), "place": place}
        count += len(names)
        for child in sorted(run[-1].in_order(), key=lambda child: -values[id(child)]):
            share = width * values[id(child)] / values[id(node)]
            if share >= _THINNEST and count < _MAX_NODES and depth < _MAX_DEPTH:
                waiting.append((child, left, share, depth + len(names)))
            left += share


def _values(tree: PrefixTree) -> dict[int, int]:
    """Return how many stacks are in each node, alike ones of a rank as one, by the node's `id`."""
    order: list[Node] = [tree.root]
    for node in order:
        order += node.children.values()
    values: dict[int, int] = {}
    for node in reversed(order):
        values[id(node)] = len(node.ranks) + sum(values[id(child)] for child in node.children.values())
    return values


def _place_of(node: Node) -> str:
    lines = sorted(line for line in node.lines if line)
    shown = ",".join(map(str, lines[:4])) + ",..." * (len(lines) > 4)
    return cut(f"{node.file}:{shown}" if shown else node.file, 300)


def _frames(thread: Mapping[str, Any]) -> list[Frame]:
    entries = mappings_of(thread.get("frames"))[:_MAX_FRAMES]
    return [
        Frame(str(one.get("function")), str(one.get("file")), line if type(line := one.get("line")) is int else 0)
        for one in entries
    ]


def _without_kit(frames: list[Frame]) -> list[Frame]:
    """Return the frames below the kit's own: of a process in a hook, what it did is below that."""
    own = [place for place, frame in enumerate(frames) if _KIT in frame.file]
    return frames[own[-1] + 1 if own else 0 :]


def _frame_of(text: str) -> Frame:
    function, between, place = text.rpartition(" (")
    file, _, line = place.removesuffix(")").rpartition(":")
    if not between or not (line.isascii() and line.isdigit() and len(line) < 10):
        return Frame(text, "", 0)
    return Frame(function, file, int(line))
