from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_crashkit.memory.journal import JournalWriter
from sglang_crashkit.srt.managers import rust_server
from sglang_crashkit.srt.managers.rust_server import journal_rust_server
from sglang_crashkit.srt.request_journal import JournaledStates
from unit.srt.conftest import told

ARGUMENTS = SimpleNamespace(crash_dump_folder="/crash")


class TokenizedGenerateReqInput(SimpleNamespace):
    """What the scheduler is handed."""


class AbortReq(SimpleNamespace):
    """What ends a request."""


class RustServer:
    """What the hook uses of SGLang's class."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.pushed: list[Any] = []

    def drain(self, max_recv: int) -> list[Any]:
        """Return what has come."""
        taken, self.waiting = self.waiting[:max_recv], self.waiting[max_recv:]
        return taken

    def push_generation(self, payload: Any, decode_latencies: dict[int, float]) -> None:
        """Give back what was computed."""
        self.pushed.append((payload.rids, decode_latencies))

    def push_abort(self, abort: Any, request: Any) -> None:
        """Give back what ends outside of that."""
        self.pushed.append((abort.rid, request))


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> JournalWriter:
    """The journal that is opened, and a fresh class where a scheduler has it."""
    writer = JournalWriter(2**20)
    module = ModuleType("scheduler")
    module.RustServer = type("RustServer", (RustServer,), dict(vars(RustServer)))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.scheduler", module)
    monkeypatch.setattr(rust_server, "open_journal", lambda states: JournaledStates(states, writer))
    return writer


def server() -> Any:
    return sys.modules["sglang.srt.managers.scheduler"].RustServer()


def request(rid: str) -> TokenizedGenerateReqInput:
    return TokenizedGenerateReqInput(rid=rid, input_text=f"text of {rid}", input_ids=[1, 2], sampling_params=None)


def test_what_is_handed_over_is_under_way_until_it_is_given_back(journal: JournalWriter) -> None:
    journal_rust_server(ARGUMENTS)
    its = server()
    its.waiting = [request("a"), request("b"), request("c"), request("d"), request("HEALTH_CHECK_1")]
    assert [one.rid for one in its.drain(9)] == ["a", "b", "c", "d", "HEALTH_CHECK_1"]
    its.push_generation(SimpleNamespace(rids=["a", "b"], finished_reasons=[{"type": "stop"}, None]), {0: 1.0})
    its.push_abort(AbortReq(rid="c"), "request")
    its.waiting = [AbortReq(rid="d", abort_all=False), SimpleNamespace(rid=None)]
    its.drain(9)
    assert told(journal) == {"a": "finished", "b": "under way", "c": "dropped", "d": "aborted"}
    assert its.pushed == [(["a", "b"], {0: 1.0}), ("c", "request")]


def test_a_request_is_not_kept_alive(journal: JournalWriter) -> None:
    journal_rust_server(ARGUMENTS)
    its, one = server(), request("a")
    its.waiting = [one]
    its.drain(1)
    del its.waiting[:]
    # This function's, and the argument's.
    assert sys.getrefcount(one) == 2
    assert told(journal) == {"a": "under way"}


def test_of_requests_that_end_without_a_word_the_oldest_go(
    journal: JournalWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rust_server, "MAX_UNDER_WAY", 2)
    journal_rust_server(ARGUMENTS)
    its = server()
    its.waiting = [request(rid) for rid in "abc"]
    its.drain(9)
    assert told(journal) == {"a": "dropped", "b": "under way", "c": "under way"}


def test_what_breaks_in_it_costs_no_request(journal: JournalWriter) -> None:
    journal_rust_server(ARGUMENTS)
    its = server()
    its.waiting = [SimpleNamespace()]
    assert len(its.drain(1)) == 1
    its.push_generation(SimpleNamespace(rids=None), {})
    assert its.pushed == [(None, {})]


@pytest.mark.parametrize("arguments", [None, SimpleNamespace(crash_dump_folder=None)])
def test_without_a_crash_folder_nothing_is_wrapped(journal: JournalWriter, arguments: Any) -> None:
    kind = type(server())
    drain = kind.drain
    journal_rust_server(arguments)
    assert kind.drain is drain
