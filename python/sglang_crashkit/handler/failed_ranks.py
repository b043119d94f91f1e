"""Ranks of which the server's main process says that they failed, and of which the crash handler knows too little.

A worker has no title in its first moments: for the handler it may be any helper then. Where it dies before, and
multiprocessing reaps it when it starts the next one, the handler may not have seen it at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sglang_crashkit.handler.incident_run import IncidentRun
from sglang_crashkit.handler.outlook import Outlook
from sglang_crashkit.handler.tree import ProcessTree
from sglang_crashkit.kernel.pidfd import ExitStatus

_PID = re.compile(r"[1-9][0-9]{0,9}", re.ASCII)
#: More than one machine's server ever waits for, and more than an exit status or a signal.
_MOST_RANKS, _MOST_CODE = 1024, 256
#: By so much, in seconds, something came before something else of which no more is known.
_A_MOMENT_SECS = 0.001


class FailedRanks:
    """Takes in the server's word for ranks that failed while it started.

    Args:
        tree: the server's processes.
        outlook: what was announced.
    """

    def __init__(self, tree: ProcessTree, outlook: Outlook) -> None:
        self._tree = tree
        self._outlook = outlook

    def learn(self, fields: Mapping[str, Any], seconds: float, run: IncidentRun | None) -> bool:
        """Take in what processes that have no titles are called, and how those ended that nobody else saw.

        Args:
            fields: ``titles`` and ``exit_codes`` by pid, the latter as `multiprocessing` writes them; may be anything.
            seconds: when it was said, since the epoch.
            run: the incident at hand.

        Returns:
            Whether any process is named.
        """
        titles, codes = (_dict_of(fields, name) for name in ("titles", "exit_codes"))
        for key, title in list(titles.items())[:_MOST_RANKS]:
            if isinstance(title, str) and title and _PID.fullmatch(key):
                code = codes.get(key)
                status = None
                if type(code) is int and abs(code) < _MOST_CODE:
                    status = ExitStatus.from_exit_code(code)
                title = title[:120].encode(errors="backslashreplace").decode()
                self._learn_of(int(key), title, status, seconds, run)
        return bool(titles)

    def _learn_of(
        self, pid: int, title: str, status: ExitStatus | None, seconds: float, run: IncidentRun | None
    ) -> None:
        process = self._tree.get(pid)
        if process is None and status is not None and pid not in self._outlook.expected:
            process = self._tree.add_reaped(pid, title, status, self._end_of_reaped(seconds))
            if run is not None:
                run.add_exit(process)
        elif process is not None and process.is_unknown:
            was_of_no_account = process.is_of_no_account
            process.title, process.is_awaited = title, True
            if status is not None and process.handle.has_exited():
                process.handle.take_exit_status(status)
            if run is not None and not run.finished and was_of_no_account:
                run.count_exit(process)

    def _end_of_reaped(self, seconds: float) -> float:
        """Return when a rank ended that nobody saw: before those that were seen, as all are started in one moment."""
        ended = [rank.exited_at for rank in self._tree if rank.exited_at is not None and not rank.is_of_no_account]
        return min([seconds, *ended]) - _A_MOMENT_SECS

    def name_the_unknown(self, run: IncidentRun) -> None:
        """Where a child failed and nobody is known to have, take it for one that died before it said what it is."""
        if run.finished or run.has_failure:
            return
        for process in self._tree:
            if process.exited_at is not None and process.may_be_worker:
                process.is_awaited = True
                run.add_exit(process)


def _dict_of(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = fields.get(name)
    return value if isinstance(value, dict) else {}
