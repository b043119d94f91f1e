"""The stacks of all processes of an incident as trees for an icicle, each node with the set of ranks in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_crashkit.analysis.ranks import Rank, RankSet, rank_at, scope_of
from sglang_crashkit.analysis.stack_tree import Node, PrefixTree, format_tree
from sglang_crashkit.cli.reporters.incident_files import IncidentFiles, cut, list_of
from sglang_crashkit.model.checked_json import mapping_of, mappings_of
from sglang_crashkit.model.sample import Frame

#: A tree of more nodes is cut at those of the deepest calls.
_MAX_NODES, _MAX_DEPTH = 4000, 200
_MAX_FRAMES, _MAX_THREADS, _MAX_LINE = 400, 2000, 1000
#: Characters of an enumeration of ranks.
MAX_NAMES = 60
#: So many sets of ranks of a tree are told.
_MAX_SETS = 24
#: Evidence with stacks, the one that tells most of a process that failed first.
_KINDS = ("fault_stack", "stack")
_KIT = "sglang_crashkit/"


@dataclass(frozen=True)
class Stack:
    """A stack of one rank."""

    rank: Rank  # whose it is
    scheduler: bool  # it is a scheduler's
    main: bool  # it is of the main thread, or of what stands for it
    frames: tuple[Frame, ...]  # innermost first


def ranks_by_pid(document: Mapping[str, Any]) -> dict[int, Rank]:
    """Return the place of each process of an incident among all."""
    found: dict[int, Rank] = {}
    seen: dict[str, int] = {}
    for process in mappings_of(document.get("processes")):
        pid, role = process.get("pid"), str(process.get("role"))
        if not isinstance(pid, int):
            continue
        if role == "scheduler":
            numbers = mapping_of(process.get("rank")).items()
            axes = {axis: number for axis, number in numbers if type(number) is int and 0 <= number < 1 << 20}
            found[pid] = rank_at(axes)
        else:
            number = seen[role] = seen.get(role, -1) + 1
            found[pid] = Rank(scope_of({"role": f"{role} {number + 1}" if number else role}), "", 0)
    return found


def read_stacks(document: Mapping[str, Any], files: IncidentFiles) -> Iterator[Stack]:
    """Yield the Python stacks of the processes of an incident; of one that raised, what it did then."""
    ranks = ranks_by_pid(document)
    for process in mappings_of(document.get("processes")):
        rank = ranks.get(process["pid"]) if isinstance(process.get("pid"), int) else None
        if rank is None:
            continue
        scheduler = process.get("role") == "scheduler"
        paths = {str(one.get("kind")): one.get("path") for one in reversed(mappings_of(process.get("evidence")))}
        raised = files.read_object(paths.get("exception")).get("traceback")
        frames = tuple(_frame_of(str(text)) for text in reversed(list_of(raised)[-_MAX_FRAMES:]))
        if frames:
            yield Stack(rank, scheduler, True, frames)
        path = next((str(paths[kind]) for kind in _KINDS if paths.get(kind)), "")
        threads = mappings_of(files.read_object(f"{path.removesuffix('.txt')}.json").get("threads"))[:_MAX_THREADS]
        for thread in threads:
            main = thread.get("native_id") == process["pid"] or thread.get("name") == "MainThread"
            taken = tuple(_without_kit(_frames(thread)))
            if taken and not (main and frames):
                yield Stack(rank, scheduler, main, taken)
        if not threads and not frames and (doing := list_of(process.get("doing"))):
            # Of one whose files are gone, its innermost frames are left.
            yield Stack(rank, scheduler, True, tuple(_frame_of(str(text)) for text in doing[:_MAX_FRAMES]))


def merge(stacks: Iterable[Stack], first: Rank | None) -> dict[str, Any]:
    """Return the trees of the main threads of the ranks, of all processes and of all threads, as JSON values.

    Returns:
        ``trees``: each with its ``name``, the ``root``, its ``text`` and the numbers of its ``sets``, the root's first
        and the others in order of their size. A node is a list: function, place, number of its set, how
        many stacks are in it, children. ``sets``: each with ``words``, its ``size``, and whether it is the ``first``
        failure alone.
    """
    known = list(stacks)
    sets = _Sets(first)
    trees: list[tuple[str, PrefixTree, dict[int, RankSet]]] = []
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
        trees.append((name, tree, tree.sets()))
    shown = []
    for name, tree, found in trees:
        root = _as_lists(tree, found, sets.number)
        text = "\n".join(cut(line, _MAX_LINE) for line in format_tree(tree))
        rest = {sets.number(one) for one in found.values()} - {root[2]}
        in_order = [root[2], *sorted(rest, key=sets.place)][:_MAX_SETS]
        shown.append({"name": name, "root": root, "text": text, "sets": in_order})
    return {"trees": shown, "sets": sets.listed}


class _Sets:
    """The sets of ranks that are in the nodes, each with a number."""

    def __init__(self, first: Rank | None) -> None:
        self.listed: list[dict[str, Any]] = []
        self._numbers: dict[str, int] = {}
        self._first = RankSet([first]).format() if first is not None else ""

    def number(self, one: RankSet) -> int:
        words = one.format()
        if words not in self._numbers:
            self._numbers[words] = len(self._numbers)
            self.listed.append({"words": cut_names(words), "size": len(one), "first": words == self._first})
        return self._numbers[words]

    def place(self, number: int) -> tuple[bool, int, int]:
        one = self.listed[number]
        return not one["first"], one["size"], number


def cut_names(names: str) -> str:
    """Return the beginning of a long enumeration of ranks."""
    return names if len(names) < MAX_NAMES else f"{names[:MAX_NAMES].rpartition(',')[0] or names[:MAX_NAMES]},..."


def _as_lists(tree: PrefixTree, sets: Mapping[int, RankSet], number: Callable[[RankSet], int]) -> list[Any]:
    """Return the tree as nested lists; those of its nodes that are nearest to the root, where there are many."""
    values = _values(tree)
    root: list[Any] = ["", "", number(sets[id(tree.root)]), values[id(tree.root)], []]
    waiting, left = [(tree.root, root, 0)], _MAX_NODES
    for node, shown, depth in waiting:
        children = sorted(node.in_order(), key=lambda child: -values[id(child)])
        for child in children:
            if left <= 0 or depth >= _MAX_DEPTH:
                shown[4].append([f"{len(children)} calls left out", "", shown[2], values[id(node)], []])
                break
            left -= 1
            entry = [cut(child.function, 200), _place_of(child), number(sets[id(child)]), values[id(child)], []]
            shown[4].append(entry)
            waiting.append((child, entry, depth + 1))
    return root


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
