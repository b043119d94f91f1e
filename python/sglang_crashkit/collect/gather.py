"""Run the collector on every node of a Slurm job, or on a list of hosts, and store the answers.

A node's answer is one JSON object with its snapshots, which comes through the standard output of srun, ssh or kubectl.
No shared file system of the nodes and containers is needed: the answer also contains the text of the node's files,
which are written here.
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

from sglang_crashkit.capture.tools import ToolRun, run_tool
from sglang_crashkit.collect.collection import SCHEMA_VERSION, VERDICT
from sglang_crashkit.errors import CrashkitError, ExitCode
from sglang_crashkit.kernel.private_files import make_private_folder, write_json, write_private
from sglang_crashkit.model import snapshot
from sglang_crashkit.model.sample import Sample
from sglang_crashkit.model.snapshot import NodeSnapshot, Problem
from sglang_crashkit.model.verdict import Verdict
from sglang_crashkit.redact import redact_text
from sglang_crashkit.view.collected import node_lines, problem_lines, tree_lines

#: The file with the results of all nodes, the verdict, and the merged stacks of all ranks.
EXPLANATION = "explanation.txt"
#: A node that prints more bytes than this is given up; no answer is that long.
MAX_OUTPUT = 1 << 28
_WIDEST = 300
#: Lines at the output's end that are searched for the answer: containers print as they end, and some never stop.
_MAX_LINES = 10_000
#: Names of a node's files that are accepted here.
_FILE_NAME = re.compile(r"\w[\w.@%+-]{0,254}")
#: Most characters that are kept of a node's standard error, from its end.
_MAX_ERRORS = 1 << 20
#: Lines of ssh, kubectl, docker and srun themselves that explain nothing, or only say that something ended.
_NOISE = re.compile(
    r"^Defaulted container|^Warning: Permanently added|^command terminated with exit code|^Connection to \S+ closed"
    r"|Exited with exit code|Terminating StepId|Terminating Job Step|Job step aborted|launch/slurm"
)
#: What these programs put before a message: program, node, level.
_MARKS = re.compile(r"^(?:(?:srun|slurmstepd(?:-[\w.-]+)?): )?(?:error: |fatal: |Error from server )?")
_FAILURE = r"(?i)error|fail|denied|refused|not found|cannot|couldn't|unable|timed? ?out|unrecognized"
#: Pattern of a message → the step that helps; other messages have to be read by hand.
_HINTS = {
    r"execve\(\)|command not found|: not found$|executable file not found|No module named '?sglang_crashkit"
    r"|invalid choice: 'collect'|can't open file|unrecognized arguments": (
        "install sglang-crashkit, of this release, in that environment or container, or name it with --remote-command"
    ),
    r"Host key verification failed|REMOTE HOST IDENTIFICATION": (
        "log in once by hand to compare and keep its key, or write it into known_hosts"
    ),
    r"[Pp]assword|passphrase|Permission denied \(|authentication fail": (
        "use a key or an agent, for a question gets no answer (ssh -o BatchMode=yes)"
    ),
    r"kex_exchange_identification|[Tt]oo many": "ask fewer at a time, such as --fan-out 8",
    r"unrecognized option '--container": "this Slurm has no pyxis: leave --container-name out",
}


@dataclass(frozen=True)
class Transport:
    """Nodes, and how a command is run on each of them."""

    nodes: tuple[str, ...]  # their names, in the order in which they are shown; each also names a folder
    noun: str  # what one of them is called, such as ``host``
    title: str  # a description of all of them for a person
    identity: Mapping[str, str]  # a description of all of them for a program
    log: str  # name of the file for a node's standard error
    look: Callable[[str], str]  # returns the command that shows more about a node that does not answer
    argv: Callable[[str, Sequence[str]], list[str]]  # returns the local arguments that run a command on a node
    environ: Mapping[str, str]  # environment of the local program, such as ssh
    #: Ends the command on a node where killing the local program does not.
    give_up: Callable[[str], None] = lambda _node: None


@dataclass
class NodeResult:
    """The result of one node."""

    node: str
    folder: Path  # the local folder of its files
    status: int | None = None  # the collector's exit status there, None where it gave no answer
    files: tuple[str, ...] = ()  # names of its files
    problems: list[Problem] = field(default_factory=list)  # what could not be collected, and why
    rounds: list[NodeSnapshot] = field(default_factory=list)  # its snapshots
    secs: float = 0.0  # how long it took, in seconds

    @property
    def processes(self) -> list[list[Sample]]:
        """The samples of each process of the node, in order of time; the processes in the order of their ranks."""
        found: dict[tuple[int, int], list[Sample]] = {}
        for one in sorted(self.rounds, key=lambda one: one.time):
            for sample in one.processes:
                found.setdefault((sample.pid, sample.start_ticks), []).append(sample)
        return sorted(found.values(), key=lambda of: (not of[-1].ranks, sorted(of[-1].ranks.items()), of[-1].pid))

    @property
    def outcome(self) -> str:
        """The result in a few words."""
        if self.status is None:
            return "no answer"
        if not (number := len(self.processes)):
            return "no process of SGLang" if self.status == ExitCode.NOTHING else "the collector failed there"
        return f"{number} process{'' if number == 1 else 'es'}"

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
    """The results of all nodes."""

    transport: Transport
    nodes: tuple[NodeResult, ...]
    interrupt: KeyboardInterrupt | None = None  # what interrupted it before all nodes had answered, if anything did

    @property
    def rounds(self) -> list[NodeSnapshot]:
        """The snapshots of all nodes."""
        return [one for node in self.nodes for one in node.rounds]

    def lines(self) -> tuple[list[str], list[str]]:
        """Return a line for each process of each node, and the lines on what could not be collected."""
        nodes = [(one.node, one.outcome, one.processes) for one in self.nodes]
        return [*node_lines(nodes)], [*problem_lines(problem for node in self.nodes for problem in node.problems)]

    def write(self, verdict: Verdict, screen: Iterable[str], output: Path) -> None:
        """Write the files `EXPLANATION` and `VERDICT`, on all nodes.

        Raises:
            CrashkitError: the folder is no folder of this user.
            OSError: it cannot be written to.
        """
        seen, missing = self.lines()
        make_private_folder(output)
        lines = [*seen, *missing, "", *screen, *tree_lines(self.rounds)]
        write_private(output / EXPLANATION, "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))
        silent = [node.node for node in self.nodes if node.status is None]
        told = {"verdict": msgspec.to_builtins(verdict), "silent": silent}
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
    transport: Transport,
    command: Sequence[str],
    output: Path,
    tell: Callable[[str], None],
    *,
    at_once: int = 32,
    node_secs: float = 300.0,
) -> Gathered:
    """Run the collector's command on all nodes, `at_once` at a time, each within `node_secs` seconds.

    Each node gets a folder of its name in `output`, which is added to the command. The local program, such as srun, ssh
    or kubectl, reads nothing, and is killed at its deadline with all that it started. Ctrl-C ends those that run and
    starts no more. A node that fails does not affect the others. `tell` is called with a line for a person as each node
    ends.
    """
    stop, interrupt = threading.Event(), None
    with ThreadPoolExecutor(max_workers=at_once) as pool:
        asked = [
            pool.submit(_ask, transport, node, command, output / node, node_secs, stop) for node in transport.nodes
        ]
        try:
            for number, future in enumerate(as_completed(asked), start=1):
                one = future.result()
                tell(f"{one.node}: {one.outcome} ({number} of {len(asked)} {transport.noun}s, {one.secs:.0f} s)")
        except KeyboardInterrupt as error:
            interrupt = error
        finally:
            stop.set()
    return Gathered(transport, tuple(future.result() for future in asked), interrupt)


def _ask(
    transport: Transport, node: str, command: Sequence[str], folder: Path, node_secs: float, stop: threading.Event
) -> NodeResult:
    result, argv = NodeResult(node, folder), transport.argv(node, [*command, f"--output-dir={folder}"])
    if stop.is_set():
        return replace(result, problems=[Problem(f"{transport.noun} {node}", "interrupted before its turn")])
    try:
        make_private_folder(folder)
    except (OSError, CrashkitError) as error:
        why = f"{argv[0]} was not started: {error}"
        return replace(result, problems=[Problem(f"{transport.noun} {node}", why)])
    done = run_tool(argv, node_secs, stop, environ=transport.environ, apart=True, max_output=MAX_OUTPUT)
    result.secs = done.seconds
    # A node's answer is kept even where its standard error cannot be written to the file.
    with contextlib.suppress(OSError):
        errors = redact_text(done.errors[-_MAX_ERRORS:])
        write_private(folder / transport.log, errors.encode(errors="backslashreplace"))
    if done.status is None:
        transport.give_up(node)
    if (document := _find_answer(done.text)) is not None:
        _store_answer(result, document, f"{transport.noun} {node}")
    elif stop.is_set():
        result.problems.append(Problem(f"{transport.noun} {node}", "interrupted"))
    else:
        result.problems.append(why_silent(transport, node, done, node_secs))
    return result


def _find_answer(output: str) -> dict[str, Any] | None:
    """Return the collector's JSON object: the last line of `output` that holds one; containers print around it."""
    for line in reversed(output.rsplit("\n", _MAX_LINES)):
        if line.startswith("{"):
            with contextlib.suppress(ValueError, RecursionError):
                document: dict[str, Any] = json.loads(line)
                if "exit_code" in document:
                    return document
    return None


def why_silent(transport: Transport, node: str, done: ToolRun, node_secs: float) -> Problem:
    """Return why a node gave no answer, with the step that helps."""
    why, is_late = done.reason, done.status is None and done.seconds >= node_secs
    following = f"read all it said: {node}/{transport.log}; look at it: {transport.look(node)}"
    if is_late:
        why = f"no answer within {node_secs:.0f} s"
        following = f"raise --node-timeout, or look at it: {transport.look(node)}"
    elif done.status is not None:
        why = f"the collector ended there with status {done.status} and without a result"
    if said := _telling_line(done.errors) or _telling_line(done.text[-_WIDEST:]):
        why = f"{why}: {said}"
        following = next((step for pattern, step in _HINTS.items() if re.search(pattern, said)), following)
    return Problem(f"{transport.noun} {node}", why, following)


def _telling_line(text: str) -> str:
    """Return the line that explains most: the first that names a failure, else the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not _NOISE.search(line)]
    telling = [line for pattern in (*_HINTS, _FAILURE) for line in lines if re.search(pattern, line)]
    return _MARKS.sub("", (telling or lines[-1:] or [""])[0])[:_WIDEST]


def _store_answer(result: NodeResult, document: Mapping[str, Any], name: str) -> None:
    """Put the answer of the node called `name` into its result, and write its files to its folder."""
    status = document["exit_code"]
    result.status = status if isinstance(status, int) else ExitCode.FAILED
    try:
        texts, snapshots = document.get("texts", {}), document.get("snapshots", [])
        of_processes = [file for process in document.get("processes", []) for file in process["files"]]
        result.files = tuple(dict.fromkeys(map(str, (*snapshots, *of_processes, *texts))))
        for one in map(snapshot.from_json, document.get("rounds", [])):
            # Use the name by which the node is reached: in a container the host's name differs from it.
            processes = tuple(replace(process, host=result.node) for process in one.processes)
            result.rounds.append(replace(one, host=result.node, processes=processes))
        files = dict(zip(snapshots, (one.to_json() for one in result.rounds), strict=True))
        for file in (*files, *texts):
            if not _FILE_NAME.fullmatch(file):
                raise ValueError(f"{file[:_WIDEST]!r} is no name of a file")
        for file, one in files.items():
            write_json(result.folder / file, one)
        for file, text in texts.items():
            write_private(result.folder / file, text.encode(errors="backslashreplace"))
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        result.status = ExitCode.PARTIAL
        result.problems.append(Problem(f"a snapshot of {name}", str(error), "install the same release of the kit"))
    found = dict.fromkeys(problem for one in result.rounds for problem in one.problems)
    result.problems += [replace(problem, what=f"{name}: {problem.what}") for problem in found]
    # A node with nothing to collect reports an error, but that is its answer and no problem.
    if "error" in document and status != ExitCode.NOTHING:
        result.problems.append(Problem(name, str(document["error"]), str(document.get("next") or "")))
