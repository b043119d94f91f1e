from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest

from sglang_crashkit.srt.on_traceback import find_batch, find_configuration, find_prompts


class Worker:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def work(self) -> None:
        raise ValueError("x")


def trace_of(action: Callable[[], None]) -> TracebackType | None:
    try:
        action()
    except ValueError:
        return sys.exc_info()[2]
    return None


def request(text: Any) -> SimpleNamespace:
    return SimpleNamespace(origin_input_text=text)


def test_the_batch_is_the_first_one_on_the_traceback() -> None:
    batch = SimpleNamespace(reqs=[])
    inner = Worker(running_batch=batch)
    outer = Worker()
    outer.work = inner.work  # type: ignore[method-assign]
    assert find_batch(trace_of(lambda: outer.work())) == (inner, batch)
    assert find_batch(trace_of(Worker().work)) == (None, None)
    assert find_batch(None) == (None, None)


@pytest.mark.parametrize("name", ["cur_batch", "cur_batch_for_debug"])
def test_the_batch_at_work_comes_before_the_one_that_is_decoded_by_turns(name: str) -> None:
    prefill, decode = SimpleNamespace(reqs=[request("new")]), SimpleNamespace(reqs=[request("old")])
    scheduler = Worker(**{"running_batch": decode, name: prefill})
    assert find_batch(trace_of(scheduler.work)) == (scheduler, prefill)
    assert find_prompts(trace_of(scheduler.work)) == ["new"]
    idle = Worker(**{"running_batch": decode, name: None})
    assert find_batch(trace_of(idle.work)) == (idle, decode)


def test_the_configuration_is_an_argument_or_an_objects() -> None:
    def run_scheduler_process(server_args: object) -> None:
        raise ValueError("x")

    assert find_configuration(trace_of(lambda: run_scheduler_process("args"))) == "args"
    assert find_configuration(trace_of(Worker(server_args="its own").work)) == "its own"
    assert find_configuration(trace_of(Worker().work)) is None


def test_prompts_are_those_of_the_batch_the_queue_and_the_tokenizer() -> None:
    scheduler = Worker(
        cur_batch=SimpleNamespace(reqs=[request("one"), request(None), SimpleNamespace()]),
        waiting_queue=[request("two"), request("")],
    )
    assert find_prompts(trace_of(scheduler.work)) == ["one", "two"]
    states = {n: SimpleNamespace(obj=SimpleNamespace(text=text)) for n, text in enumerate([["a", "b"], "c", None, 5])}
    assert find_prompts(trace_of(Worker(rid_to_state=states | {9: object()}).work)) == ["a", "b", "c"]
    assert find_prompts(trace_of(Worker().work)) == []


def test_a_request_at_hand_has_a_prompt_too() -> None:
    class Awkward:
        @property
        def text(self) -> str:
            raise RuntimeError

    def dispatch(received: object, _other: object) -> None:
        raise ValueError(f"Invalid object: {received}")

    asked = SimpleNamespace(input_text="tell me", text=None)
    assert find_prompts(trace_of(lambda: dispatch(asked, Awkward()))) == ["tell me"] * 2


def test_prompts_are_not_without_end() -> None:
    scheduler = Worker(waiting_queue=[request(f"prompt {n}") for n in range(1000)])
    assert len(find_prompts(trace_of(scheduler.work))) == 64
