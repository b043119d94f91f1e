from __future__ import annotations

import enum
import pickle
import sys
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglang_crashkit.srt.redaction import redact, redact_dump

SECRET = "S3CRET-canary"


class Kind(enum.Enum):
    ONE = 1


class Pair(NamedTuple):
    api_key: str
    other: str


@dataclass
class Inner:
    hf_token: str = SECRET
    tokens: int = 5


@dataclass(slots=True)
class Slotted:
    password: str = SECRET


@dataclass
class Frozen:
    """Like upstream's arguments: sealed, with bookkeeping beside its fields, and a pickled form of its own."""

    api_key: str | None = SECRET
    admin_api_key: str | None = None
    model_path: str = "/model"
    inner: Inner = field(default_factory=Inner)
    time_to_first_token: tuple[float, ...] = (0.1, 0.2)
    _raw_input: dict[str, Any] = field(default_factory=lambda: {"api_key": SECRET, "list": [{"password": SECRET}]})

    def __reduce__(self) -> Any:
        return rebuild, (type(self), dict(self.__dict__))


def rebuild(kind: type, state: dict[str, Any]) -> Any:
    made = kind.__new__(kind)
    made.__dict__.update(state)
    return made


@dataclass
class Plain:
    api_key: str = SECRET
    kind: Kind = Kind.ONE
    path: Path = Path("/x")
    others: Any = None


@dataclass
class Refusing(Plain):
    def __getattribute__(self, name: str) -> Any:
        if name == "others":
            raise ValueError("it differs from layer to layer")
        return super().__getattribute__(name)


def dumped(data: dict[str, Any]) -> bytes:
    redact_dump(data)
    return pickle.dumps(data)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("kind", [Plain, Frozen])
def test_an_object_keeps_its_shape_but_not_its_secrets(kind: type, protocol: int) -> None:
    original = kind()
    data = {"server_args": original, "requests": []}
    redact_dump(data)
    content = pickle.dumps(data, protocol)
    assert SECRET.encode() not in content
    back = pickle.loads(content)["server_args"]
    assert type(back) is kind
    assert back.api_key == "<redacted>"
    assert {name for name, value in vars(back).items() if value != vars(original)[name]} <= {
        "api_key",
        "inner",
        "_raw_input",
    }
    assert original.api_key == SECRET


def test_what_is_nested_is_found() -> None:
    slotted = pickle.loads(dumped({"x": Plain(others=Slotted()), "requests": []}))["x"].others
    assert slotted == Slotted("<redacted>")
    back = pickle.loads(dumped({"server_args": Frozen(), "requests": []}))["server_args"]
    assert back.inner == Inner("<redacted>", 5)
    assert back._raw_input == {"api_key": "<redacted>", "list": [{"password": "<redacted>"}]}
    assert back.time_to_first_token == (0.1, 0.2)
    assert back.admin_api_key is None


def test_every_text_loses_the_secrets_that_fields_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--hf-token", "from-the-arguments"])
    monkeypatch.setenv("SOME_API_KEY", "from-the-environment")
    data: dict[str, Any] = {
        "server_args": Plain(others=f"a note of {SECRET}"),
        "config_updates": [("source", {"admin_api_key": "another-one"})],
        "launch_command": "python x --api-key with spaces --hf-token from-the-arguments",
        "resolved_config": {"a": ["from-the-environment", "another-one"], "max_total_tokens": 5, "flag": True},
        "requests": [(f"a prompt with {SECRET}",)],
    }
    back = pickle.loads(dumped(data))
    assert back["launch_command"] == "python x --api-key <redacted> spaces --hf-token <redacted>"
    assert back["server_args"].others == "a note of <redacted>"
    assert back["config_updates"] == [("source", {"admin_api_key": "<redacted>"})]
    assert back["resolved_config"] == {"a": ["<redacted>", "<redacted>"], "max_total_tokens": 5, "flag": True}
    assert back["requests"] == [(f"a prompt with {SECRET}",)]


def test_containers_of_other_kinds_stay_what_they_are() -> None:
    value = [{1}, frozenset({2}), (3,), None, b"x", Kind.ONE, Pair("a", "b"), OrderedDict(a=1), deque([1]), int, Plain]
    assert pickle.loads(dumped({"x": value, "requests": []}))["x"] == value


def test_an_unpicklable_configuration_is_upstreams_to_leave_out() -> None:
    data = {"server_args": Plain(others=lambda: None), "requests": [1]}
    redact_dump(data)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(data)
    data["server_args"] = None  # type: ignore[assignment]
    assert pickle.loads(pickle.dumps(data)) == {"server_args": None, "requests": [1]}


def test_what_cannot_be_searched_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    class Hostile(dict):  # type: ignore[type-arg]
        def items(self) -> Any:
            raise ValueError("no")

        def values(self) -> Any:
            raise ValueError("no")

    data: dict[str, Any] = {"server_args": Hostile(), "launch_command": f"--api-key {SECRET}", "requests": [1]}
    assert pickle.loads(dumped(data)) == {"server_args": None, "launch_command": None, "requests": [1]}
    assert "left out of the dump" in caplog.text


def test_a_field_that_refuses_to_be_read_is_dumped_as_it_is_stored() -> None:
    # As transformers' configurations do with what differs from layer to layer.
    data = {"server_args": Refusing(others=f"a note of {SECRET}"), "requests": [1]}
    assert pickle.loads(dumped(data))["server_args"].__dict__["others"] == "a note of <redacted>"


def test_a_configuration_without_end_has_one() -> None:
    loop: dict[str, Any] = {"api_key": SECRET}
    loop["self"] = loop
    assert SECRET.encode() not in dumped({"x": loop, "requests": []})


def test_a_message_loses_what_this_process_knows_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--api-key", "from-arguments"])
    monkeypatch.setenv("SOME_API_KEY", "from-environment")
    text = f"from-arguments from-environment {SECRET} tell me of the canary"
    redacted = redact(text, Plain(), None, prompts=["tell me of the canary"])
    assert redacted == "<redacted> <redacted> <redacted> <redacted>"


def test_a_message_that_cannot_be_searched_is_withheld() -> None:
    def prompts() -> Any:
        yield "one"
        raise ValueError("no")

    assert redact("from-arguments", prompts=prompts()).startswith("<withheld")
