"""Run the collector on every node of a Slurm job, or of a list of hosts, and take in what the nodes answer.

A node's answer is one JSON object, with its snapshots in it. It comes through the standard output of srun, ssh or
kubectl, so that nothing depends on a file system that all nodes and containers share: the answer has what is in the
node's files too, which are written here.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from sglang_crashkit.capture.tools import run_tool
from sglang_crashkit.collect.collection import SCHEMA_VERSION, SUMMARY, VERDICT
from sglang_crashkit.errors import CrashkitError, ExitCode
from sglang_crashkit.kernel.private_files import make_private_folder, write_json, write_private
from sglang_crashkit.model import snapshot
from sglang_crashkit.model.sample import Sample
from sglang_crashkit.model.snapshot import NodeSnapshot, Problem
from sglang_crashkit.model.verdict import Verdict
from sglang_crashkit.redact import redact_text
from sglang_crashkit.view.collected import node_lines, problem_lines, tree_lines, verdict_section
from sglang_crashkit.view.markdown import section_lines

#: The file with all that is told of all nodes, and the merged stacks of all ranks.
EXPLANATION = "explanation.txt"
#: Of so many nodes that gave no answer the summary says why.
_MAX_SILENT = 100
_WIDEST = 300
#: The answer is the last line, or nearly: containers print as they end, and some print for ever.
_MAX_LINES = 10_000
#: A name that a file of a node may have here.
_FILE_NAME = re.compile(r"\w[\w.@%+-]{0,254}")
#: Of what was said beside an answer, the last is kept.
_MAX_ERRORS = 1 << 20
#: A pattern of what is said, why there is no answer, and what to do about it. In the last two stand ``{said}``,
#: ``{node}`` and ``{look}``; see `Transport.look`.
Reason = tuple[str, str, str]
#: What has the collector not start, whatever carries its command.
_NOT_STARTED: Reason = (
    r"execve\(\)|command not found|: not found$|executable file not found|No module named '?sglang_crashkit"
    r"|invalid choice: 'collect'|can't open file|unrecognized arguments",
    "the collector cannot be run there: {said}",
    "install sglang-crashkit, of this release, in that environment or container, or name it with --remote-command",
)


@dataclass(frozen=True)
class Limits:
    """How many nodes are asked at the same time, and how long each may take, in seconds."""

    at_once: int = 32
    node_secs: float = 300.0
    max_output: int = 1 << 28  # of how many bytes of output a node is given up; none has more to say


@dataclass(frozen=True)
class NodeRun:
    """What became of the command for one node."""

    node: str
    status: int | None  # the carrier's exit status, None where it did not end by itself or was not started
    output: str = ""  # what the command printed on the node, to standard output
    errors: str = ""  # what it and the carrier printed to standard error
    problem: str = ""  # why there is no status; empty where there is one
    secs: float = 0.0  # how long it took, in seconds
    late: bool = False  # it was killed at its deadline


@dataclass(frozen=True)
class Transport:
    """Nodes, and how a command is run on each of them."""

    nodes: tuple[str, ...]  # their names, in the order in which they are shown; each is the name of a folder, too
    noun: str  # what one of them is called
    title: str  # what all of them are, for a person
    identity: Mapping[str, str]  # the same for a program
    log: str  # the name of the file of what is said beside a node's answer
    reasons: Sequence[Reason]  # the first that fits tells
    noise: re.Pattern[str]  # of lines that say nothing
    marks: re.Pattern[str]  # of what stands before each message
    look: Callable[[str], str]  # returns the command that says more of a node that does not answer
    argv: Callable[[str, Sequence[str]], list[str]]  # returns the arguments that run a command on a node
    environ: Mapping[str, str]  # the environment of the program that carries it there
    #: Ends what runs on a node, where killing that program does not.
    give_up: Callable[[str], None] = lambda _node: None


@dataclass
class NodeResult:
    """What came of one node."""

    node: str
    status: int | None  # the collector's exit status there, None where it gave no answer
    folder: Path  # where its files are
    files: tuple[str, ...] = ()  # their names
    problems: list[Problem] = field(default_factory=list)  # what could not be had, and why
    #: What was seen of each process on it, in order of time; the processes in the order of their ranks.
    processes: list[list[Sample]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, without its stacks."""
        processes = [
            {
                **{name: getattr(samples[-1], name) for name in ("pid", "title", "role")},
                "ranks": dict(samples[-1].ranks),
                "states": [sample.state for sample in samples],
            }
            for samples in self.processes
        ]
        return {
            "node": self.node,
            "exit_code": self.status,
            "folder": str(self.folder),
            "files": list(self.files),
            "processes": processes,
            "problems": [vars(problem) for problem in self.problems],
        }


@dataclass(frozen=True)
class Gathered:
    """What came of all nodes."""

    transport: Transport
    nodes: tuple[NodeResult, ...]  # a result for each of them
    rounds: Sequence[NodeSnapshot]  # what all nodes saw
    interrupt: KeyboardInterrupt | None = None  # what ended it before all nodes had answered, None where nothing did

    def lines(self) -> tuple[list[str], list[str]]:
        """Return a line for each process of each node, and what could not be had."""
        nodes = [(one.node, describe(one.status, len(one.processes)), one.processes) for one in self.nodes]
        return [*node_lines(nodes)], [*problem_lines(problem for node in self.nodes for problem in node.problems)]

    def write(self, verdict: Verdict, screen: Iterable[str], output: Path) -> None:
        """Write what is reported of all nodes, with the merged stacks of all ranks.

        Raises:
            CrashkitError: the folder is no folder of this user.
            OSError: it cannot be written to.
        """
        seen, missing = self.lines()
        silent = [node for node in self.nodes if node.status is None]
        more = f"{self.transport.title}; more: {EXPLANATION}, {VERDICT}, a folder each {self.transport.noun}"
        why = [f"{one.what} gave no answer: {one.why}" for node in silent[:_MAX_SILENT] for one in node.problems]
        head = map(redact_text, section_lines(verdict_section(verdict, [more, *why])))
        make_private_folder(output)
        for name, lines in (
            (EXPLANATION, [*seen, *missing, "", *screen, *tree_lines(self.rounds)]),
            (SUMMARY, head),
        ):
            write_private(output / name, "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))
        told = {"verdict": msgspec.to_builtins(verdict), "silent": [node.node for node in silent]}
        write_json(output / VERDICT, {"schema_version": SCHEMA_VERSION, **self.transport.identity, **told})

    def to_json(self, verdict: Verdict, output: Path, status: ExitCode) -> dict[str, Any]:
        """Return it as JSON values, without the stacks."""
        return {
            "exit_code": int(status),
            **self.transport.identity,
            "output_dir": str(output),
            "explanation": EXPLANATION,
            "nodes": [node.to_json() for node in self.nodes],
            "verdict": msgspec.to_builtins(verdict),
        }


def gather(
    transport: Transport, command: Sequence[str], output: Path, tell: Callable[[str], None], limits: Limits
) -> Gathered:
    """Run the collector's command on all nodes; each gets a folder of its name in `output`, and adds it to the command.

    `tell` is called with a line for a person as each node ends.
    """
    commands = {node: [*command, f"--output-dir={output / node}"] for node in transport.nodes}
    results: dict[str, NodeResult] = {}
    all_rounds: list[NodeSnapshot] = []

    def take_in(run: NodeRun) -> None:
        if run.node in results:
            return
        result, rounds = _read(run, transport, output / run.node)
        result.processes = _by_process(rounds)
        results[run.node] = result
        all_rounds.extend(rounds)
        if not run.problem.startswith("interrupted"):
            so_far = f"{len(results)} of {len(transport.nodes)} {transport.noun}s, {run.secs:.0f} s"
            tell(f"{run.node}: {describe(result.status, len(result.processes))} ({so_far})")

    interrupt = run_on_nodes(transport, commands, take_in, output, limits)
    return Gathered(transport, tuple(results[node] for node in transport.nodes), all_rounds, interrupt)


def describe(status: int | None, processes: int) -> str:
    """Return in a few words what came of a node, by its collector's exit status, and of how many processes."""
    if status is None:
        return "no answer"
    if not processes:
        return "no process of SGLang" if status == ExitCode.NOTHING else "the collector failed there"
    return f"{processes} process{'' if processes == 1 else 'es'}"


def find_answer(output: str) -> dict[str, Any] | None:
    """Return the JSON object of a collector on the last line of `output` that is one; containers print around it."""
    end = len(output)
    for _ in range(_MAX_LINES):
        start = output.rfind("\n", 0, end) + 1
        if output.startswith("{", start):
            with contextlib.suppress(ValueError, RecursionError):
                document: dict[str, Any] = json.loads(output[start:end])
                if "exit_code" in document:
                    return document
        if start == 0:
            break
        end = start - 1
    return None


def why_silent(run: NodeRun, transport: Transport) -> Problem:
    """Return why a node gave no answer, with the step that helps."""
    what, reasons = f"{transport.noun} {run.node}", (_NOT_STARTED, *transport.reasons)
    said = _telling_line(run.errors, transport, reasons) or _telling_line(run.output[-_WIDEST:], transport, reasons)
    for pattern, why, following in reasons:
        if re.search(pattern, said):
            return Problem(what, why.format(said=said), following.format(node=run.node, look=transport.look(run.node)))
    said = f": {said}" if said else ""
    if run.late:
        following = f"raise --node-timeout, or look at it: {transport.look(run.node)}"
        return Problem(what, f"{run.problem}{said}", following)
    if run.problem:
        return Problem(what, run.problem)
    status = f"the collector ended there with status {run.status} and without a result"
    return Problem(what, f"{status}{said}", f"read all it said: {run.node}/{transport.log}")


def _telling_line(text: str, transport: Transport, reasons: Sequence[Reason]) -> str:
    """Return the line of what was said that tells the most: the first that has a known reason, else the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not transport.noise.search(line)]
    telling = [line for line in lines if any(re.search(pattern, line) for pattern, _why, _next in reasons)]
    return transport.marks.sub("", (telling or lines[-1:] or [""])[0])[:_WIDEST]


def _read(run: NodeRun, transport: Transport, folder: Path) -> tuple[NodeResult, list[NodeSnapshot]]:
    """Return what came of a node, and its snapshots."""
    document, name = find_answer(run.output), f"{transport.noun} {run.node}"
    if document is None:
        return NodeResult(run.node, None, folder, problems=[why_silent(run, transport)]), []
    status = document["exit_code"]
    result = NodeResult(run.node, status if isinstance(status, int) else ExitCode.FAILED, folder)
    rounds: list[NodeSnapshot] = []
    try:
        of_processes = [name for process in document.get("processes", []) for name in process["files"]]
        names = (*document.get("snapshots", []), *of_processes, *document.get("texts", {}))
        result.files = tuple(dict.fromkeys(map(str, names)))
        rounds += (_renamed(snapshot.from_json(entry), run.node) for entry in document.get("rounds", []))
        _write_returned(document, rounds, folder)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        result.status = ExitCode.PARTIAL
        result.problems.append(Problem(f"a snapshot of {name}", str(error), "install the same release of the kit"))
    found = dict.fromkeys(problem for one in rounds for problem in one.problems)
    result.problems += [replace(problem, what=f"{name}: {problem.what}") for problem in found]
    # Where there is nothing to collect, that is the answer.
    if "error" in document and status != ExitCode.NOTHING:
        result.problems.append(Problem(name, str(document["error"]), str(document.get("next") or "")))
    return result, rounds


def _write_returned(document: Mapping[str, Any], rounds: Sequence[NodeSnapshot], folder: Path) -> None:
    """Write the files of a node that came with its answer.

    Raises:
        OSError: it is not possible.
        ValueError: one has no name that a file here may have.
    """
    texts = document.get("texts", {})
    snapshots = dict(zip(document.get("snapshots", []), rounds, strict=True))
    for name in (*snapshots, *texts):
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"{name[:_WIDEST]!r} is no name of a file")
    for name, one in snapshots.items():
        write_json(folder / name, one.to_json())
    for name, text in texts.items():
        write_private(folder / name, text.encode(errors="backslashreplace"))


def _renamed(one: NodeSnapshot, node: str) -> NodeSnapshot:
    """Return a snapshot with the name by which its node is reached, which in a container is not the host's name."""
    if one.host == node and all(process.host == node for process in one.processes):
        return one
    return replace(one, host=node, processes=tuple(replace(process, host=node) for process in one.processes))


def _by_process(rounds: Sequence[NodeSnapshot]) -> list[list[Sample]]:
    found: dict[tuple[int, int], list[Sample]] = {}
    for one in sorted(rounds, key=lambda one: one.time):
        for sample in one.processes:
            found.setdefault((sample.pid, sample.start_ticks), []).append(sample)
    return sorted(found.values(), key=lambda some: (not some[-1].ranks, sorted(some[-1].ranks.items()), some[-1].pid))


def run_on_nodes(
    transport: Transport,
    commands: Mapping[str, Sequence[str]],
    on_end: Callable[[NodeRun], None],
    output: Path,
    limits: Limits,
) -> KeyboardInterrupt | None:
    """Run the command of each node, from a bounded pool; Ctrl-C ends all that run and starts no more.

    What runs here is the program that carries the command to its node, such as srun, ssh or kubectl. It reads nothing,
    and is killed, with all that it started, at its deadline. Whatever one of them does, the others' answers come.
    `on_end` is called for each node in this thread, as it ends; once more where Ctrl-C came in between. What is said
    beside the answer goes to a folder of the node's name in `output`.

    Returns:
        What ended it before all nodes had answered, None where nothing did.
    """
    stop = threading.Event()

    def run(node: str, argv: Sequence[str]) -> NodeRun:
        if stop.is_set():
            return NodeRun(node, None, problem="interrupted before its turn")
        try:
            make_private_folder(output / node)
        except (OSError, CrashkitError) as error:
            return NodeRun(node, None, problem=f"{argv[0]} was not started: {error}")
        done = run_tool(
            argv, limits.node_secs, stop, environ=transport.environ, apart=True, max_output=limits.max_output
        )
        ended = NodeRun(node, done.status, done.text, done.errors[-_MAX_ERRORS:], secs=done.seconds)
        if stop.is_set():
            ended = replace(ended, status=None, problem="interrupted")
        elif done.status is None:
            late = done.seconds >= limits.node_secs
            why = f"no answer within {limits.node_secs:.0f} s" if late else done.reason
            ended = replace(ended, problem=why, late=late)
        # An answer counts for more than what was said beside it.
        with contextlib.suppress(OSError):
            write_private(output / node / transport.log, redact_text(ended.errors).encode(errors="backslashreplace"))
        if ended.status is None:
            transport.give_up(node)
        return ended

    interrupt = None
    with ThreadPoolExecutor(max_workers=limits.at_once) as pool:
        pending = {pool.submit(run, node, transport.argv(node, words)): node for node, words in commands.items()}
        try:
            for future in as_completed(tuple(pending)):
                on_end(future.result())
                # What a node printed is not kept, for a thousand nodes print much.
                del pending[future]
        except KeyboardInterrupt as error:
            interrupt = error
        finally:
            stop.set()
    # Those that the interruption ended, in the order of the commands.
    for future in pending:
        on_end(future.result())
    return interrupt
