"""Run pytest with the kit's plugin in a process of its own, and read its JUnit report."""

from __future__ import annotations

import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path


@dataclass
class Run:
    """What a run of pytest left.

    Attributes:
        output: what it printed, stderr included.
        status: its exit status.
        seconds: how long it took.
        outcomes: by name of the test what it was: ``passed``, ``failure``, ``error`` or ``skipped``.
        messages: by name of the test what it failed of.
    """

    output: str
    status: int
    seconds: float
    outcomes: dict[str, list[str]] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)


def run_pytest(
    arguments: Sequence[str | Path], *, report: Path, cwd: Path, environ: Mapping[str, str], timeout_secs: float
) -> Run:
    """Run pytest on `arguments`; its JUnit report goes to `report`."""
    names = {entry.name for entry in metadata.entry_points(group="pytest11")}
    plugin = [] if "sglang_crashkit" in names else ["-p", "sglang_crashkit.test.plugin"]
    command = [sys.executable, "-m", "pytest", *plugin, "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    command += ["--junitxml", str(report), *map(str, arguments)]
    report.unlink(missing_ok=True)
    began = time.monotonic()
    # A file, not a pipe: a process that outlives the run would hold that open.
    with report.with_suffix(".output").open("w+") as output:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={name: value for name, value in environ.items() if name != "PYTEST_ADDOPTS"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=timeout_secs,
            check=False,
        )
        output.seek(0)
        result = Run(output.read(), done.returncode, time.monotonic() - began)
    for case in ElementTree.parse(report).getroot().iter("testcase") if report.exists() else ():
        name = case.attrib["name"]
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        result.outcomes.setdefault(name, []).extend(kinds or ["passed"])
        for child in case:
            if child.tag in ("failure", "error"):
                # The attribute is cut; the text has the whole.
                result.messages[name] = f"{child.attrib['message']}\n{child.text}"
    return result
