"""The last log records of each process of the server, as ``logs/<process>.log`` in an incident."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.handler.collectors.held import HeldRings
from sglang_crashkit.incident.folder import REQUESTS
from sglang_crashkit.incident.retention import status_of
from sglang_crashkit.kernel import titles
from sglang_crashkit.memory.log_ring import LogRecord, read_log
from sglang_crashkit.model.incident import Evidence, iso_time
from sglang_crashkit.redact import redact_prompts, redact_text, secrets_of_mapping

if TYPE_CHECKING:
    from sglang_crashkit.handler.incident import IncidentRun
    from sglang_crashkit.handler.processes import ProcessTree

OFF = "switched off by SGLANG_CRASHKIT_LOG_RECORDS"
_WITHHELD = "<withheld: it could not be searched for secrets in time>"
#: As many prompts as are compared, and so much of the file with them is read for each, in bytes.
_MAX_PROMPTS, _MAX_LINE = 256, 4 << 20
#: So much is compared with the prompts at a time, in characters.
_AT_A_TIME = 16_384
_BETWEEN = "\0"


class ProcessLogs(HeldRings):
    """The rings of log records of the server at hand, which outlive every process of it."""

    what = "log"
    most_of_dead = 16
    most_of_one = 1

    def add_to(self, run: IncidentRun, tree: ProcessTree, most: int, deadline: float) -> None:
        """Put the logs into an incident that is about to be finished, its requests being there already.

        Args:
            run: the incident.
            tree: the server's processes; of each of its own a log is expected.
            most: how many records of each; 0 where they are not wanted.
            deadline: what is not searched by then for secrets and prompts, by the monotonic clock, is withheld; a full
                one takes about 0.1 s.
        """
        prompts = _prompts_in(run.path / REQUESTS)
        rings = {held.process: held.descriptor for held in self.held}
        for process in tree:
            if not process.matters:
                continue
            report = run.report(process)
            # Of an attempt to finish it that failed.
            report.evidence = [piece for piece in report.evidence if piece.kind != "log"]
            descriptor = rings.get(process)
            if descriptor is None:
                reason = "it did not log by Python's logging, or no crash handler held it" if most else OFF
                report.evidence.append(Evidence("log", "skipped", reason=reason))
                continue
            name = f"logs/{titles.label_of(report.title, report.pid)}.log"
            try:
                lines = format_log(read_log(descriptor, most), prompts, deadline)
                if lines:
                    path = run.folder.write_text(name, "".join(lines))
                    report.evidence.append(Evidence("log", "captured", path=path))
                else:
                    report.evidence.append(Evidence("log", "skipped", reason="it logged nothing"))
            except (OSError, CrashkitError) as error:
                report.evidence.append(Evidence("log", status_of(error), reason=f"{name}: {error}"))
        self.taken = [held for held in self.held if held.is_of_dead]


def format_log(records: Sequence[LogRecord], prompts: Sequence[str], deadline: float) -> list[str]:
    """Return one text for each record, without secrets and without prompts.

    Args:
        records: what was logged.
        prompts: what users sent.
        deadline: what is not searched by then, by the monotonic clock, is withheld.
    """
    secrets = secrets_of_mapping(os.environ)
    # What was said last tells most, and is searched first.
    newest = records[::-1]
    said = [redact_text(one.text, secrets) if time.monotonic() < deadline else _WITHHELD for one in newest]
    if prompts:
        said = _without_prompts(said, prompts, deadline)
    lines = (
        f"{iso_time(one.seconds)} {logging.getLevelName(one.level)} {one.logger}: {text}\n"
        for one, text in zip(newest, said, strict=True)
    )
    return list(lines)[::-1]


def _without_prompts(texts: Sequence[str], prompts: Sequence[str], deadline: float) -> list[str]:
    """Return the texts without what they share with the prompts: many at a time, as each search takes all prompts."""
    found: list[str] = []
    while len(found) < len(texts):
        chunk: list[str] = []
        size = 0
        for text in islice(texts, len(found), None):
            if chunk and size + len(text) > _AT_A_TIME:
                break
            chunk.append(text.replace(_BETWEEN, " "))
            size += len(text)
        searched: list[str] = []
        if time.monotonic() < deadline:
            searched = redact_prompts(_BETWEEN.join(chunk), prompts).split(_BETWEEN)
        found += searched if len(searched) == len(chunk) else [_WITHHELD] * len(chunk)
    return found


def _prompts_in(path: Path) -> list[str]:
    """Return the prompts of the first requests in an incident's file, those under way first."""
    found = []
    with contextlib.suppress(OSError), path.open("rb") as file:
        for line in islice(iter(lambda: file.readline(_MAX_LINE), b""), _MAX_PROMPTS):
            # The last one may be cut off where the disk is full.
            with contextlib.suppress(ValueError, AttributeError, RecursionError):
                text = json.loads(line).get("text")
                texts = text if isinstance(text, list) else [text]
                found += [one for one in texts if isinstance(one, str)]
    return found
