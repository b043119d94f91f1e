"""Send groups of requests to servers of one's own, and remember what each came to."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.kernel.private_files import write_json
from sglang_crashkit.kernel.server_arguments import value_of
from sglang_crashkit.replay.fault import is_same_fault, words_of
from sglang_crashkit.replay.requests import StoredRequest
from sglang_crashkit.replay.sender import MAX_AT_ONCE, send_all
from sglang_crashkit.replay.server import OwnServer

TRIALS = "trials.json"
#: ``same`` is the incident's fault; ``other`` another one, or a server that answers no more; ``refused`` that it serves
#: on, and took none of them.
Outcome = Literal["same", "other", "survived", "refused"]
#: What innocent requests came to, or a group after them: they bring the fault back, or are not fit to tell anything;
#: it brings the fault back, or does not.
Contrast = Literal["harm", "unfit", "same", "survived"]
_OUTCOMES = get_args(Outcome)
#: In seconds: how often it is looked whether all have tried, and how long a server's end may take.
_LOOK_SECS, _END_SECS = 0.1, 90.0


class BudgetSpentError(CrashkitError):
    """No more servers may be started."""


@dataclass(frozen=True)
class Plan:
    """How the trials are done."""

    command: list[str]  # the words of the command that serves
    folder: Path  # where everything goes
    tries: int = 3  # how often the whole is tried before it counts as not reproduced
    #: How many servers are started at most; one that did not get ready, and was started again, is one.
    max_starts: int = 30
    ready_secs: float = 900.0  # the longest that a server may take to start, in seconds
    request_secs: float = 300.0  # the longest that an answer may take, in seconds
    jobs: int = 1  # how many of them serve at once


class Trials:
    """Sends groups of requests to servers of one's own, and remembers what each came to.

    The document is of the incident whose fault is looked for; `say` is called with a line for each step.
    """

    def __init__(self, document: Mapping[str, Any], plan: Plan, say: Callable[[str], object]) -> None:
        self.starts = self._kept = 0
        self._document, self._plan, self._say = document, plan, say
        self._servers: list[OwnServer | None] = [None] * plan.jobs
        self._known = self._read()
        #: What failed as the first that its server got.
        self._afresh: set[str] = set()
        self._refusal: CrashkitError | None = None
        self._was_accepted = self._is_over = False
        self._lock = threading.Lock()

    def first_failing(self, groups: Sequence[Sequence[StoredRequest]]) -> int | None:
        """Return the index of the first group that brings the fault back; see `search`.

        Raises:
            BudgetSpentError: it would take one more server than the plan allows.
            CrashkitError: a server cannot be started.
        """
        turn = _Turn(groups)
        if self._plan.jobs == 1:
            self._work(0, turn)
        else:
            workers = [
                threading.Thread(target=self._work_beside, args=(slot, turn), daemon=True)
                for slot in range(self._plan.jobs)
            ]
            try:
                for worker in workers:
                    worker.start()
                while any(worker.is_alive() for worker in workers):
                    for worker in workers:
                        worker.join(_LOOK_SECS)
            except BaseException:
                turn.is_stopped = True
                with self._lock:
                    self._is_over = True
                # One that still starts ends when its server does.
                self.close()
                for worker in workers:
                    worker.join(_END_SECS)
                raise
        if turn.error is not None:
            raise turn.error
        return turn.first

    def fails_afresh(self, group: Sequence[StoredRequest], *, in_order: bool = False) -> bool:
        """Say whether a group brings the fault back on a server to which nothing was sent before.

        In order each is sent when the one before it was answered.
        """
        self.close()
        return self._try(0, group, in_order=in_order) == "same"

    def failed_afresh(self, group: Sequence[StoredRequest]) -> bool:
        """Say whether a group brought the fault back as the first that a server got."""
        return _key(group) in self._afresh

    def survived(self, group: Sequence[StoredRequest]) -> bool:
        """Say whether a server survived a group that was tried."""
        return self._known.get(_key(group)) == "survived"

    def contrast(
        self, innocent: Sequence[StoredRequest], group: Sequence[StoredRequest], *, in_order: bool = False
    ) -> Contrast:
        """Send `innocent` requests to a new server, and then a group; in order that has a server of its own.

        What was sent before counts in order.
        """
        self.close()
        outcome = self._try(0, innocent, in_order=in_order)
        if outcome == "same":
            return "harm"
        if outcome != "survived":
            return "unfit"
        if in_order:
            self.close()
        return "same" if self._try(0, group, in_order=in_order) == "same" else "survived"

    @property
    def starts_left(self) -> int:
        """How many more servers may be started."""
        return self._plan.max_starts - self.starts

    @contextlib.contextmanager
    def keeping(self, starts: int) -> Iterator[None]:
        """Have so many starts be left after the block; fewer where there are no more."""
        self._kept = starts
        try:
            yield
        finally:
            self._kept = 0

    def forget_survivors(self) -> None:
        """Have those tried again that did not fail: a fault may not come every time."""
        self._known = {key: outcome for key, outcome in self._known.items() if outcome == "same"}
        self.close()

    def raise_refusal(self) -> None:
        """Raise an error where no request was ever taken."""
        if self._refusal is not None and not self._was_accepted:
            raise self._refusal

    def close(self) -> None:
        """End the servers at hand."""
        for slot in range(len(self._servers)):
            self._close(slot)

    def _close(self, slot: int) -> None:
        server = self._servers[slot]
        if server is not None:
            # It is known until it has ended, for an interrupt may cut this.
            server.end()
            self._servers[slot] = None

    def _work_beside(self, slot: int, turn: _Turn) -> None:
        try:
            self._work(slot, turn)
        except Exception as error:  # noqa: BLE001 - the thread that waits for this one raises it
            turn.error = turn.error or error
            if turn.is_stopped:
                self._close(slot)

    def _work(self, slot: int, turn: _Turn) -> None:
        for number, group in turn.take():
            outcome = self._known.get(_key(group)) or self._try(slot, group, functools.partial(turn.is_moot, number))
            if turn.is_moot(number):
                # Its answers were not waited for.
                self._close(slot)
                continue
            with self._lock:
                self._known[_key(group)] = outcome
                self._write()
            if outcome == "same":
                turn.found(number)

    def _try(
        self,
        slot: int,
        group: Sequence[StoredRequest],
        is_moot: Callable[[], bool] = lambda: False,
        *,
        in_order: bool = False,
    ) -> Outcome:
        server = self._servers[slot]
        is_first = server is None
        if server is None:
            server = self._start(slot)
        key = value_of(self._plan.command, "--api-key") or ""
        answers = send_all(
            server.address,
            group,
            self._plan.request_secs,
            api_key=key,
            at_once=1 if in_order else MAX_AT_ONCE,
            is_over=lambda: server.is_failing or is_moot(),
        )
        if is_moot():
            return "other"
        refused = [answer for answer in answers if answer.is_refused]
        is_refused = len(refused) == len(group)
        if is_refused:
            # What asks for less may make no sense; where nothing is ever taken it is the server that does not fit.
            self._refusal = CrashkitError(
                f"the server refuses the requests with status {refused[0].status}: {refused[0].problem}",
                next_step="serve the same model with the same arguments",
            )
        else:
            self._was_accepted = True
        is_lost = len(answers) < len(group) or any(answer.is_lost for answer in answers)
        found = server.failure(wait=is_lost)
        what = (
            f"{len(group)} requests{' in order' if in_order else ''}" if len(group) != 1 else f"request {group[0].rid}"
        )
        name = server.folder.name
        if found is None and not is_lost and not server.has_ended:
            self._say(f"{name}: {what}: it serves on")
            return "refused" if is_refused else "survived"
        is_same = found is not None and is_same_fault(found.document or {}, self._document)
        told = words_of(found.document or {}) if found is not None else "it answers no more, and there is no incident"
        self._say(f"{name}: {what}: {'the same fault' if is_same else 'another fault'}: {told}")
        self._close(slot)
        if is_same and is_first and not in_order:
            self._afresh.add(_key(group))
        return "same" if is_same else "other"

    def _start(self, slot: int) -> OwnServer:
        with self._lock:
            if self._is_over:
                raise CrashkitError("no server is started any more")
            if self.starts_left <= self._kept:
                raise BudgetSpentError(
                    f"{self.starts} servers were started of the {self._plan.max_starts} that --starts allows",
                    next_step="the same command again with a larger --starts goes on from here",
                )
            self.starts += 1
            folder = self._plan.folder / f"server-{self.starts}"
            while folder.exists():
                # Of a run before.
                folder = folder.with_name(f"{folder.name}-again")
            server = self._servers[slot] = OwnServer(self._plan.command, folder)
        self._say(f"{folder.name}: starting")
        server.start(self._plan.ready_secs, self._say)
        return server

    def _read(self) -> dict[str, Outcome]:
        try:
            known = json.loads((self._plan.folder / TRIALS).read_text())
            is_same = (known["incident"], known["command"]) == (self._document.get("id"), self._plan.command)
            trials = known["trials"] if is_same else {}
            return {str(key): value for key, value in trials.items() if value in _OUTCOMES}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}

    def _write(self) -> None:
        told = {"incident": self._document.get("id"), "command": self._plan.command, "trials": self._known}
        write_json(self._plan.folder / TRIALS, told)


class _Turn:
    """Groups that are tried in their order by several at once, until the first that fails is known.

    Attributes:
        first: its index; None where none is known.
        error: why one of those that try could not go on.
        is_stopped: nobody is to go on.
    """

    def __init__(self, groups: Sequence[Sequence[StoredRequest]]) -> None:
        self.first: int | None = None
        self.error: Exception | None = None
        self.is_stopped = False
        self._groups = enumerate(groups)
        self._lock = threading.Lock()

    def take(self) -> Iterator[tuple[int, Sequence[StoredRequest]]]:
        """Yield what is to be tried next, with its index."""
        while True:
            with self._lock:
                number, group = next(self._groups, (-1, ()))
                if number < 0 or self.error is not None or self.is_moot(number):
                    return
            yield number, group

    def found(self, number: int) -> None:
        """Note that a group fails."""
        with self._lock:
            self.first = number if self.first is None else min(self.first, number)

    def is_moot(self, number: int) -> bool:
        """Say whether it does not matter any more whether a group fails."""
        return self.is_stopped or (self.first is not None and number > self.first)


def _key(group: Iterable[StoredRequest]) -> str:
    bodies = [dict(one.body) for one in group]
    return hashlib.sha256(json.dumps(bodies, sort_keys=True).encode()).hexdigest()
