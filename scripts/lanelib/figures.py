"""The figures of the benchmarks: run a benchmark, keep its output, and write the documents that quote it."""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lanelib.commands import parser_of
from lanelib.paths import ROOT, write_whole

FOLDER = ROOT / "benchmarks"
DATA, PAGE, README = ROOT / "docs" / "benchmarks.json", ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
#: The lines of README.md between which its table of figures is written.
BEGIN, END = "<!-- costs: made by scripts/bench -->", "<!-- end of costs -->"
#: A benchmark is ended after this many times its expected time; then it has `END_S` seconds to end its servers.
PATIENCE = 6
END_S = 150


Form = Literal["whole", "quick", "alone"]


@dataclass(frozen=True)
class Benchmark:
    """A program of `benchmarks/`."""

    name: str  # its file
    whole: tuple[str, float] | None  # its arguments and minutes in a whole run; None if it runs only when named
    quick: tuple[str, float] | None = None  # its arguments and minutes in a quick run; None if it does not run then
    alone: tuple[str, float] | None = None  # its arguments and minutes when named; None if they are those of `whole`

    def arguments(self, form: Form) -> list[str]:
        """Return its arguments in a run of this form."""
        return self._of(form)[0].split()

    def minutes(self, form: Form) -> float:
        """Return the expected minutes."""
        return self._of(form)[1]

    def _of(self, form: Form) -> tuple[str, float]:
        forms = {"whole": self.whole, "quick": self.quick, "alone": self.alone}
        return forms[form] or self.whole or ("", 60.0)

    @property
    def about(self) -> str:
        """The first line of its docstring, which says what it measures."""
        text = ast.get_docstring(ast.parse((FOLDER / self.name).read_text())) or self.name
        return text.splitlines()[0]


#: Benchmarks that start servers come last: an interrupted run then has the figures of the others.
BENCHMARKS = (
    Benchmark("beat", ("", 0.5), ("", 0.5)),
    Benchmark("steps", ("--pairs 3000", 8), ("", 0.5)),
    Benchmark("log_ring", ("", 0.5), ("", 0.5)),
    Benchmark("kill_process_tree", ("", 1), ("--rounds 10", 0.5)),
    Benchmark("explain", ("", 2), ("", 2)),
    Benchmark("explain_log", ("", 2), ("", 2)),
    Benchmark("capture", ("", 4), ("--quick", 1)),
    Benchmark("gloo_recorder", ("", 2), None),
    Benchmark("idle_handler", ("", 3), ("--seconds 20", 2)),
    Benchmark("first_crash", ("--release 0.5.9 --release 0.5.12.post1 --release 0.5.23 --both", 10), ("", 2)),
    Benchmark("overhead", ("--pairs 160 --starts 2", 8), ("--quick", 5)),
    Benchmark("others", ("", 4), None),
    Benchmark("hangs", ("", 8), ("--quick", 5)),
    Benchmark("faults", ("--release 0.5.23", 20), ("--quick", 1.5), alone=("", 60)),
    Benchmark("journal", ("", 1), ("", 1)),
    Benchmark("soak", ("--minutes 5", 8), None),
    Benchmark("releases", ("--known", 0.1), ("--known", 0.1), alone=("", 180)),
    # It takes half an hour or more, so it runs only when it is named.
    Benchmark("causes", None, alone=("", 40)),
)


class Table:
    """Prints the rows of a benchmark: as text in columns, or as one JSON object per row.

    Args:
        widths: name of a column → its width; the first column is aligned to the left, the others to the right.
        as_json: print JSON objects.
    """

    def __init__(self, widths: Mapping[str, int], *, as_json: bool) -> None:
        self._widths, self._as_json = dict(widths), as_json
        if not as_json:
            self._print(list(widths))

    def row(self, *cells: str) -> None:
        """Print a row."""
        if self._as_json:
            print(json.dumps(dict(zip(self._widths, cells, strict=True))), flush=True)
        else:
            self._print(cells)

    def note(self, text: str) -> None:
        """Print a line of text below the rows."""
        print(json.dumps({"note": text}) if self._as_json else text, flush=True)

    def _print(self, cells: Sequence[str]) -> None:
        (first, width), *others = self._widths.items()
        sides = [f"{cells[0]:{max(width, len(first))}}"]
        sides += [f"{cell:>{max(wide, len(name))}}" for cell, (name, wide) in zip(cells[1:], others, strict=True)]
        print("  ".join(sides).rstrip(), flush=True)


def benchmark_parser(text: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark with this docstring: ``--quick`` and ``--json``."""
    parser = parser_of(text)
    parser.add_argument("--quick", action="store_true", help="run the most important parts, in a few minutes")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    return parser


@dataclass(frozen=True)
class Run:
    """One run of a benchmark."""

    name: str  # name of the benchmark
    command: str  # the command line, from the checkout
    lines: tuple[str, ...]  # its output
    seconds: float  # how long it took
    status: int  # its exit status; 1 where it missed a goal of its own
    date: str  # date and time of its end, UTC
    why: str = ""  # the last line of its standard error where it missed its goal, or how it failed


def measure(benchmark: Benchmark, kept: Path, *, form: Form, env: Mapping[str, str]) -> Run:
    """Run a benchmark, or return the run that was kept of it.

    A run that did not end in time (see `PATIENCE`), or printed nothing, is not kept; `Run.why` says so.

    Args:
        benchmark: the benchmark.
        kept: the file that keeps the run once it has ended.
        form: selects the arguments.
        env: the environment of the benchmark.
    """
    if kept.is_file():
        document = json.loads(kept.read_text())
        return Run(**document | {"lines": tuple(document["lines"])})
    arguments, began = benchmark.arguments(form), time.monotonic()
    limit = PATIENCE * 60 * benchmark.minutes(form)
    argv, failed = [str(FOLDER / benchmark.name), *arguments], ""
    with subprocess.Popen(
        argv, cwd=ROOT, env=dict(env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        try:
            text, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            text, errors = _end(process)
            failed = f"it did not end in {limit / 60:.0f} minutes"
        except BaseException:
            _end(process)
            raise
    if not text.strip():
        failed = failed or f"it printed nothing, status {process.returncode}: {errors.strip()[-500:]}"
    run = Run(
        name=benchmark.name,
        command=" ".join([f"benchmarks/{benchmark.name}", *arguments]),
        lines=tuple(line.rstrip() for line in text.splitlines()),
        seconds=round(time.monotonic() - began, 1),
        status=process.returncode or int(bool(failed)),
        date=time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        why=failed or ("\n".join(errors.splitlines()[-1:]) if process.returncode else ""),
    )
    if not failed:
        write_whole(kept, json.dumps(asdict(run), indent=1))
    return run


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End a benchmark, which ends the processes that it started, and return its output and errors."""
    process.terminate()
    try:
        return process.communicate(timeout=END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return "", ""


def machine() -> str:
    """Describe the machine that the figures are measured on."""
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores, {gigabytes:.0f} GB, {platform.machine()}, Linux {platform.release().split('-')[0]}"


def write_documents(runs: Sequence[Run], where: str, load: float) -> None:
    """Write the figures as data and as a page, and README's table; a benchmark without a run keeps its old figures."""
    document = json.loads(DATA.read_text()) if DATA.is_file() else {"benchmarks": {}}
    known: dict[str, Any] = document["benchmarks"]
    for run in runs:
        if run.lines or run.name not in known:
            known[run.name] = asdict(run) | {"machine": where, "load": round(load, 1)}
        else:
            known[run.name] = known[run.name] | {"failed": f"{run.date} UTC: {run.why}"}
    write_whole(DATA, json.dumps(document, indent=1) + "\n")
    write_whole(PAGE, page(document))
    text = README.read_text()
    if BEGIN in text:
        write_whole(README, with_costs(text, document))


def page(document: Mapping[str, Any]) -> str:
    """Return ``docs/benchmarks.md``."""
    lines = ["# Benchmarks", "", *INTRODUCTION.splitlines()]
    for one in BENCHMARKS:
        run = document["benchmarks"].get(one.name)
        if run is None:
            continue
        lines += ["", f"## {one.name}", "", one.about, "", "```", f"$ {run['command']}", *run["lines"], "```", ""]
        missed = f" It missed its goal: {run['why'] or 'see the table'}." if run["status"] else ""
        failed = f" The run after it failed, {run['failed']}." if "failed" in run else ""
        lines += [f"{run['date']} UTC, {run['machine']}, load {run['load']}, {run['seconds']:.0f} s.{missed}{failed}"]
    return "\n".join(lines) + "\n"


INTRODUCTION = """\
Written by `scripts/bench`. Each benchmark runs the kit and SGLang as published on the same machine; its `--help`
explains the columns. Compare the ratios, not the seconds, which depend on the machine. The load is the average of the
15 minutes before the end of the run; other load makes all times longer."""

#: A row of README's table each: what costs, and where its figure is: the benchmark, a row by its beginning, a column.
COSTS = (
    ("the crash handler: memory", "idle_handler", "sglang::crash_handler", 0),
    ("the crash handler: of one core, while nothing happens", "idle_handler", "sglang::crash_handler", 1),
    ("a round of a scheduler's event loop with a batch", "beat", "on 0", 1),
    ("the record of a step, 8 requests", "steps", "8", 1),
    ("the throughput of 8 clients, with that record/without", "steps", "0.5.23 throughput, with/without", 0),
    ("the CPU time of a token, 4 clients, with the kit/without", "overhead", "CPU time, a token 4 clients", 2),
    ("of that, 95 % of what it may be", "overhead", "CPU time, a token 4 clients", 3),
    ("from the death of one of 8 ranks to the whole incident", "capture", "8", 6),
    ("from the kill of a rank to the server's end, kit/upstream", "first_crash", "0.5.23 kit/upstream", 0),
)


def costs(document: Mapping[str, Any]) -> Iterable[str]:
    """Yield the lines of README's table, without the figures that are not known."""
    yield "| what it costs | measured | by |"
    yield "| --- | --- | --- |"
    for what, name, beginning, column in COSTS:
        run = document["benchmarks"].get(name)
        found = figure(run["lines"], beginning, column) if run else None
        if found is not None:
            yield f"| {what} | {found} | [`benchmarks/{name}`](docs/benchmarks.md#{name}) |"


def figure(lines: Iterable[str], beginning: str, column: int) -> str | None:
    """Return one cell of a benchmark's table, whose columns two spaces separate; `beginning` may span several."""
    for line in lines:
        cells = [cell for cell in line.replace(", more ", "  ").strip().split("  ") if cell.strip()]
        cells = [cell.strip() for cell in cells]
        for taken in range(1, len(cells)):
            if " ".join(cells[:taken]) == beginning:
                return cells[taken:][column]
    return None


def with_costs(text: str, document: Mapping[str, Any]) -> str:
    """Return the text of README.md with a new table."""
    head, _, rest = text.partition(BEGIN)
    _old, _, tail = rest.partition(END)
    return "\n".join([f"{head}{BEGIN}", *costs(document), f"{END}{tail}"])
