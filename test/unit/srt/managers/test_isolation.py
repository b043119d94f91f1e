"""A suspected request is sent alone, and nobody waits for long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from sglang_crashkit.srt.managers import isolation
from sglang_crashkit.srt.managers.isolation import HOLD_SECS, PATIENCE_SECS, AbortedError, Isolation

DONE = {"meta_info": {"finish_reason": {"type": "stop"}}}
ABORTED = {"meta_info": {"finish_reason": {"type": "abort"}}}


class FakeLoop(asyncio.SelectorEventLoop):
    """A loop whose clock goes on when there is nothing to do."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


class Server:
    """What SGLang does of requests: each is under way for a while, and is noted with when it began and beside whom."""

    def __init__(self) -> None:
        self.under_way: set[str] = set()
        self.began: dict[str, tuple[float, set[str]]] = {}
        self.told: list[str] = []
        self.is_ending = False
        self.isolation = Isolation(lambda: bool(self.under_way), lambda: self.is_ending)

    async def run(self, rid: str, secs: float, chunks: int = 1) -> AsyncIterator[Any]:
        self.began[rid] = (asyncio.get_running_loop().time(), set(self.under_way))
        self.under_way.add(rid)
        try:
            for number in range(chunks):
                await asyncio.sleep(secs / chunks)
                if number == chunks - 1:
                    self.under_way.discard(rid)
                yield DONE if number == chunks - 1 else {"meta_info": {"finish_reason": None}}
        finally:
            self.under_way.discard(rid)

    async def ask(self, rid: str, secs: float = 1.0, *, suspected: bool = False, after: float = 0.0) -> None:
        await asyncio.sleep(after)
        responses = self.run(rid, secs)
        if suspected:
            responses = self.suspect(responses, rid)
        elif self.isolation.is_holding:
            responses = self.isolation.later(responses, [rid], None)
        # As SGLang asks for one response.
        await responses.__anext__()

    def suspect(self, responses: AsyncIterator[Any], *rids: str, client: Any = None, **how: bool) -> AsyncIterator[Any]:
        return self.isolation.alone(responses, rids or ["a"], client, lambda: self.told.append("answered"), **how)


async def each(*responses: Any) -> AsyncIterator[Any]:
    for response in responses:
        if isinstance(response, Exception):
            raise response
        yield response


class Client:
    """A connection that says whether it has gone, each time that it is asked."""

    def __init__(self, *is_gone: bool) -> None:
        self._is_gone = list(is_gone)

    async def is_disconnected(self) -> bool:
        return self._is_gone.pop(0)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLoop]:
    with contextlib.closing(FakeLoop()) as made:
        monkeypatch.setattr(isolation.time, "monotonic", made.time)
        yield made


def run(loop: FakeLoop, story: Callable[[Server], Awaitable[object]]) -> Server:
    async def whole() -> Server:
        server = Server()
        await story(server)
        # As the loop ends generators that nobody asks any more.
        await asyncio.sleep(0.1)
        assert not server.isolation.is_holding
        return server

    return loop.run_until_complete(whole())


def test_a_suspect_waits_for_the_others_and_they_for_it(loop: FakeLoop) -> None:
    server = run(
        loop,
        lambda server: asyncio.gather(
            server.ask("before", 3.0), server.ask("suspect", suspected=True, after=1.0), server.ask("later", after=3.5)
        ),
    )
    assert server.began["suspect"][1] == set()
    assert 3.0 < server.began["suspect"][0] < 3.2
    assert server.began["later"] == (pytest.approx(server.began["suspect"][0] + 1.0, abs=0.1), set())
    assert server.told == ["answered"]


def test_under_load_others_are_held_once_and_not_for_long(loop: FakeLoop) -> None:
    server = run(
        loop,
        lambda server: asyncio.gather(
            server.ask("suspect", suspected=True, after=0.1),
            *(server.ask(f"load-{number}", 2.0, after=number * 0.5) for number in range(80)),
        ),
    )
    began, beside = server.began["suspect"]
    assert PATIENCE_SECS < began < PATIENCE_SECS + HOLD_SECS
    assert beside == set()
    assert max(server.began[f"load-{number}"][0] - number * 0.5 for number in range(80)) <= HOLD_SECS


def test_a_request_that_never_gets_its_moment_is_sent(loop: FakeLoop) -> None:
    server = run(
        loop,
        lambda server: asyncio.gather(
            server.ask("long", 1000.0),
            server.ask("suspect", suspected=True, after=1.0),
            server.ask("held", after=PATIENCE_SECS + 1.5),
        ),
    )
    assert server.began["suspect"][0] <= 1.0 + PATIENCE_SECS + HOLD_SECS + 0.1
    assert server.began["suspect"][1] == {"long"}
    assert server.began["held"][0] - PATIENCE_SECS - 1.5 <= HOLD_SECS


def test_a_long_suspect_lets_others_join_it(loop: FakeLoop) -> None:
    server = run(
        loop,
        lambda server: asyncio.gather(server.ask("suspect", 100.0, suspected=True), server.ask("other", after=1.0)),
    )
    assert server.began["other"][0] <= HOLD_SECS + 0.1
    assert server.began["other"][1] == {"suspect"}


def test_suspects_are_sent_one_after_the_other(loop: FakeLoop) -> None:
    server = run(loop, lambda server: asyncio.gather(*(server.ask(str(number), suspected=True) for number in range(3))))
    assert [beside for _began, beside in server.began.values()] == [set()] * 3
    assert server.told == ["answered"] * 3


def test_many_suspects_do_not_wait_for_ever(loop: FakeLoop) -> None:
    server = run(
        loop, lambda server: asyncio.gather(*(server.ask(str(number), 30.0, suspected=True) for number in range(40)))
    )
    assert max(began for began, _beside in server.began.values()) <= PATIENCE_SECS + HOLD_SECS + 0.1


@pytest.mark.parametrize("suspected", [True, False])
@pytest.mark.parametrize("everything", [True, False])
def test_an_abort_of_one_that_waits_has_it_not_sent(loop: FakeLoop, suspected: bool, everything: bool) -> None:
    async def story(server: Server) -> None:
        first = asyncio.ensure_future(server.ask("first", 3.0, suspected=True))
        await asyncio.sleep(0.5)
        waiting = asyncio.ensure_future(server.ask("waiting", suspected=suspected))
        await asyncio.sleep(0.5)
        server.isolation.abort("waiting", everything=everything)
        with pytest.raises(AbortedError):
            await waiting
        await first

    assert "waiting" not in run(loop, story).began


@pytest.mark.parametrize("after", [0.01, 0.5, 1.5])
def test_one_that_is_cancelled_holds_nobody_up(loop: FakeLoop, after: float) -> None:
    async def story(server: Server) -> None:
        first = asyncio.ensure_future(server.ask("first", 1.0))
        suspect = asyncio.ensure_future(server.ask("suspect", 9.0, suspected=True))
        await asyncio.sleep(after)
        suspect.cancel()
        with pytest.raises(asyncio.CancelledError):
            await suspect
        await first
        await asyncio.wait_for(server.ask("next", suspected=True), 3.0)

    assert run(loop, story).began["next"][1] == set()


def test_a_client_that_has_gone_is_not_asked_for(loop: FakeLoop) -> None:
    async def story(server: Server) -> None:
        with pytest.raises(AbortedError, match="client has gone"):
            await server.suspect(server.run("a", 1.0), client=Client(True)).__anext__()

    assert run(loop, story).began == {}


def test_a_server_that_ends_lets_all_go_on(loop: FakeLoop) -> None:
    async def story(server: Server) -> None:
        server.is_ending = True
        await asyncio.gather(server.ask("long", 50.0), server.ask("suspect", suspected=True, after=1.0))

    assert run(loop, story).began["suspect"][0] < 1.5


@pytest.mark.parametrize(
    ("last", "is_answer"),
    [
        (DONE, True),
        ([DONE, DONE], True),
        (ABORTED, False),
        ([DONE, {"meta_info": {}}], False),
        ("text", False),
    ],
)
def test_only_an_answer_ends_the_suspicion(loop: FakeLoop, last: Any, is_answer: bool) -> None:
    async def story(server: Server) -> None:
        whole = server.suspect(each({"meta_info": {"finish_reason": None}}, last))
        assert [response async for response in whole][-1] == last

    assert ("answered" in run(loop, story).told) is is_answer


@pytest.mark.parametrize(("last", "is_answer"), [(DONE, True), (ABORTED, False)])
def test_a_streamed_batch_is_answered_at_its_end(loop: FakeLoop, last: Any, is_answer: bool) -> None:
    async def story(server: Server) -> None:
        seen = []
        async for response in server.suspect(each(DONE, last), "a", "b", is_single=False):
            seen.append(response)
            assert server.told == []
        assert seen == [DONE, last]

    assert ("answered" in run(loop, story).told) is is_answer


def test_the_first_item_of_a_failing_batch_is_no_answer(loop: FakeLoop) -> None:
    async def story(server: Server) -> None:
        with pytest.raises(ValueError, match="the second one"):
            assert [one async for one in server.suspect(each(DONE, ValueError("the second one")), is_single=False)]

    assert run(loop, story).told == []


def test_one_aborted_item_leaves_the_rest_of_a_batch(loop: FakeLoop) -> None:
    async def story(server: Server) -> None:
        server.under_way.add("other")
        first = asyncio.ensure_future(server.suspect(server.run("a", 1.0), "a", "b").__anext__())
        await asyncio.sleep(0.1)
        server.isolation.abort("a", everything=False)
        server.under_way.discard("other")
        assert await first == DONE

    assert "answered" in run(loop, story).told


def test_an_error_of_sglang_holds_up_nobody(loop: FakeLoop) -> None:
    async def story(server: Server) -> None:
        with pytest.raises(ValueError, match="too long"):
            await server.suspect(each(ValueError("too long"))).__anext__()
        await asyncio.wait_for(server.ask("next", suspected=True), 3.0)

    assert run(loop, story).told == ["answered"]
