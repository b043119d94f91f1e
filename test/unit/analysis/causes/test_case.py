from __future__ import annotations

from typing import Any

import pytest

from sglang_crashkit.analysis.causes.case import Case, parse_error, place_of


@pytest.mark.parametrize(
    ("frame", "place"),
    [
        ("Scheduler.run_batch (sglang/srt/managers/scheduler.py:2000)", "run_batch (scheduler.py)"),
        ("forward (x.py)", "forward (x.py)"),
        ("<native>", "<native>"),
    ],
)
def test_a_place_has_neither_line_nor_folder_nor_class(frame: str, place: str) -> None:
    assert place_of(frame) == place


@pytest.mark.parametrize(
    ("message", "kind", "text"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory\nmore", "torch.OutOfMemoryError", "CUDA out of memory\nmore"),
        ("KeyboardInterrupt", "KeyboardInterrupt", ""),
        ("2 words: x", "", "2 words: x"),
    ],
)
def test_a_message_is_parted_into_type_and_text(message: str, kind: str, text: str) -> None:
    raised = parse_error(7, message)
    assert (raised.type, raised.text) == (kind, text)


def test_an_exception_came_through_all_of_the_places_asked_for() -> None:
    raised = parse_error(7, "ValueError: x", ["load (a/loader.py:1)", "M.__init__ (b/model_runner.py:2)"])
    assert raised.came_through("load *", "__init__ (model_runner.py)")
    assert not raised.came_through("load *", "forward *")
    assert raised.paths == ("a/loader.py", "b/model_runner.py")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"arguments": {"tp_size": 2, "quantization": None, "port": 0}}, {"--tp-size", "--tp-size=2"}),
        ({"command_line": "python --tp 2 --x=3 --flag --y"}, {"--tp=2", "--tp", "--x=3", "--x", "--flag", "--y"}),
        ({"arguments": 5}, set()),
    ],
)
def test_arguments_are_those_that_were_set(environment: dict[str, Any], words: set[str]) -> None:
    assert Case({"environment": environment}).arguments == words


@pytest.mark.parametrize(("node_count", "is_so"), [(1, False), (2, True)])
def test_a_server_of_several_nodes_is_known(node_count: int, is_so: bool) -> None:
    assert Case({"environment": {"arguments": {"nnodes": node_count}}}).has_other_nodes is is_so


@pytest.mark.parametrize(
    ("memory", "share"),
    [({"used_bytes": 1, "total_bytes": 4}, 0.25), ({"used_bytes": 1, "total_bytes": 0}, None), ({}, None)],
)
def test_how_full_shared_memory_is_may_be_unknown(memory: dict[str, int], share: float | None) -> None:
    assert Case({"environment": {"shared_memory": memory}}).shared_memory_use == share


def test_an_xid_of_long_before_does_not_count() -> None:
    xids = [{"xid": 79, "time": 0.0}, {"xid": 48, "time": 1767225600.0}, {"xid": "x"}]
    document = {"trigger": {"time": "2026-01-01T00:00:00Z"}, "gpus": {"xids": xids}}
    assert [one["xid"] for one in Case(document).xids] == [48]
