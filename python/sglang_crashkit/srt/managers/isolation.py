"""Send one request while no other one is under way, so that what becomes of the server is its doing.

Everything here runs in SGLang's event loop, and every wait has an end: a request that is suspected waits for its turn
and for a moment without others, and is sent all the same when that does not come. Others are held for that moment and
while it runs, each for `HOLD_SECS` at most. Of several tokenizer workers each knows its own requests only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import Any

logger = logging.getLogger(__name__)

#: All in seconds. Others are held so long at most, and then not for as long as they were; a suspect waits so long for a
#: moment without others; how often it looks.
HOLD_SECS, PATIENCE_SECS, LOOK_SECS = 5.0, 20.0, 0.02
#: A request is on its way for a moment before SGLang counts it as under way.
_LOOKS = 2

Responses = AsyncIterator[Any]


class AbortedError(ValueError):
    """The request was given up while it waited; SGLang answers a ValueError."""


class Isolation:
    """Holds requests back for a while.

    Args:
        is_busy: whether requests are under way.
        is_ending: whether the server is about to end, so that nobody waits any more.
    """

    def __init__(self, is_busy: Callable[[], bool], is_ending: Callable[[], bool] = lambda: False) -> None:
        self._is_busy, self._is_ending = is_busy, is_ending
        #: A suspect has its turn.
        self._is_taken = False
        self._opened: asyncio.Event | None = None
        self._held_since = self._rest_until = 0.0
        #: Of those that wait here the ids by a token of each; None once it was aborted.
        self._waiting: dict[object, Collection[str] | None] = {}

    @property
    def is_holding(self) -> bool:
        """Whether others have to wait."""
        return self._opened is not None

    def abort(self, rid: str, *, everything: bool) -> None:
        """Have a request that waits here not be sent."""
        for token, rids in self._waiting.items():
            # Of a batch that one alone is not wanted any more.
            left = {one for one in rids or () if one != rid}
            if everything or (rids and not left):
                self._waiting[token] = None
            elif rids:
                self._waiting[token] = left

    async def later(self, responses: Responses, rids: Collection[str], connection: Any) -> Responses:
        """Yield the responses to an ordinary request, which is begun when others need not wait any more."""
        token, opened = self._enter(rids), self._opened
        try:
            if opened is not None:
                await asyncio.wait_for(opened.wait(), HOLD_SECS)
        except asyncio.TimeoutError:
            pass
        finally:
            is_aborted = self._leave(token)
        await _check(connection, is_aborted)
        async for response in responses:
            yield response

    async def alone(
        self,
        responses: Responses,
        rids: Collection[str],
        connection: Any,
        on_answer: Callable[[], object],
        *,
        is_single: bool = True,
    ) -> Responses:
        """Yield the responses to a suspected request, which is begun when no other is under way, if that comes soon.

        Args:
            responses: what SGLang's own generator gives.
            rids: its ids, of a batch all of them.
            connection: FastAPI's request.
            on_answer: called when all of it was answered.
            is_single: it has one answer, and is no batch.
        """
        token, has_turn, has_answer = self._enter(rids), False, False
        try:
            try:
                has_turn = await self._begin(token)
            finally:
                is_aborted = self._leave(token)
            await _check(connection, is_aborted)
            async for response in responses:
                if _is_answer(response) and (is_single or isinstance(response, list)):
                    on_answer()
                    # Who wants one response only never asks for the next one.
                    has_turn = self._end(has_turn)
                else:
                    # Of a batch that is streamed each item has a last response of its own.
                    has_answer = has_answer or _is_answer(response)
                is_aborted = is_aborted or _is_abort(response)
                yield response
            if has_answer and not is_aborted:
                on_answer()
        finally:
            self._end(has_turn)

    async def _begin(self, token: object) -> bool:
        """Wait for a moment without others, in which others are held; return whether it is this one's turn."""
        patience_ends = time.monotonic() + PATIENCE_SECS
        while self._must_wait() and time.monotonic() < patience_ends:
            if self._is_over(token):
                return False
            await asyncio.sleep(LOOK_SECS)
        if self._is_taken:
            return False
        self._is_taken = True
        try:
            if time.monotonic() >= self._rest_until:
                self._hold()
            looks = 0
            while self.is_holding and looks < _LOOKS and not self._is_over(token):
                looks = 0 if self._is_busy() else looks + 1
                await asyncio.sleep(LOOK_SECS)
        except BaseException:
            self._end(True)
            raise
        return True

    def _must_wait(self) -> bool:
        return self._is_taken or self._is_busy() or time.monotonic() < self._rest_until

    def _is_over(self, token: object) -> bool:
        return self._waiting.get(token) is None or self._is_ending()

    def _hold(self) -> None:
        opened, self._held_since = asyncio.Event(), time.monotonic()
        self._opened = opened
        asyncio.get_running_loop().call_later(HOLD_SECS, self._open, opened)

    def _open(self, opened: asyncio.Event | None) -> None:
        if opened is not None and opened is self._opened:
            self._opened = None
            now = time.monotonic()
            self._rest_until = now + (now - self._held_since)
            opened.set()

    def _end(self, has_turn: bool) -> bool:
        """Let the others go on, and the next suspect have its turn; return that it is not this one's any more."""
        if has_turn:
            self._open(self._opened)
            self._is_taken = False
        return False

    def _enter(self, rids: Collection[str]) -> object:
        token = object()
        self._waiting[token] = rids
        return token

    def _leave(self, token: object) -> bool:
        return self._waiting.pop(token, None) is None


async def _check(connection: Any, is_aborted: bool) -> None:
    """Raise what SGLang raises of a request that nobody waits for any more."""
    if is_aborted:
        raise AbortedError("the request was aborted before it was sent to a rank")
    asked = getattr(connection, "is_disconnected", None)
    if asked is not None and await asked():
        raise AbortedError("the client has gone before its request was sent to a rank")


def _is_answer(response: object) -> bool:
    """Say whether a response is the last one of its request, which was not aborted."""
    if isinstance(response, list):
        return bool(response) and all(map(_is_answer, response))
    return bool(_finish_reason_of(response)) and not _is_abort(response)


def _is_abort(response: object) -> bool:
    if isinstance(response, list):
        return any(map(_is_abort, response))
    reason = _finish_reason_of(response)
    return isinstance(reason, Mapping) and reason.get("type") == "abort"


def _finish_reason_of(response: object) -> object:
    about = response.get("meta_info") if isinstance(response, Mapping) else None
    return about.get("finish_reason") if isinstance(about, Mapping) else None
