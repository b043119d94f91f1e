"""Reads ``crash_dump_*.pkl``, SGLang's requests and arguments from before its end, without running any code of it.

Format: ``dump_requests_before_crash`` in ``sglang/srt/managers/tokenizer_manager.py`` writes a dictionary with
``server_args``, ``launch_command`` and ``requests``: tuples of the request, its last answer, and the times when it came
and ended. An object of any class in the pickle becomes a `_Shell` with its fields; no class is imported.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import Any

from sglang_crashkit.model.event import Arguments, Dumped, Event
from sglang_crashkit.sources.text import facts

_MAX_REQUESTS, _MAX_FIELDS, _MAX_VALUE, _MAX_TOLD = 100_000, 2000, 200, 3
#: Instructions that allocate a size that they state, refer to data outside the file, or need a real class.
_REFUSED = b"\x96\x97\x98\x82\x83\x84PQio"


class _Shell:
    """An object in place of one of any class: it stores the fields that a pickle sets, and runs no other code."""

    fields: dict[str, Any]

    def __new__(cls, *args: object, **_fields: object) -> _Shell:
        """Create an object without `__init__`, which a pickle may not call."""
        self = super().__new__(cls)
        self.fields = {}
        self.__setstate__(args)  # some classes are created from a dictionary of their fields
        return self

    def __setstate__(self, state: object) -> None:
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if isinstance(part, dict):
                self.fields |= {str(name): value for name, value in list(part.items())[:_MAX_FIELDS]}

    def __setitem__(self, name: object, value: object) -> None:
        if len(self.fields) < _MAX_FIELDS:
            self.fields[str(name)] = value

    def append(self, _value: object) -> None:
        """Ignore an item, or items, of a subclass of list."""

    extend = append


class _ShellUnpickler(pickle._Unpickler):
    """Builds plain data and shells. Python's own unpickler, unlike C's, allocates no unused places of the memo."""

    dispatch = {code: step for code, step in pickle._Unpickler.dispatch.items() if code not in _REFUSED}  # noqa: RUF012

    def find_class(self, _module: str, _name: str) -> Any:
        return _Shell


def is_dump(head: bytes) -> bool:
    """Return whether a file begins like such a dump."""
    return head[:1] == b"\x80" and b"server_args" in head[:4096]


def events_of(data: bytes) -> Iterator[Event]:
    """Yield the arguments of the server, and the number of requests that it had not finished.

    Raises:
        ValueError: the data is not such a dump, or is cut off.
    """
    try:
        document = _ShellUnpickler(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, RecursionError,
            TypeError, ValueError) as error:  # fmt: skip
        raise ValueError(f"{type(error).__name__}: {str(error)[:100]}") from None
    if not isinstance(document, dict) or not isinstance(document.get("requests"), list):
        raise ValueError("it has no list of requests")
    values = _fields(document.get("server_args"))
    command = document.get("launch_command")
    if not values and isinstance(command, list):
        values = facts.arguments_of("sglang.launch_server " + " ".join(map(str, command))[:20_000]) or {}
    if values:
        plain = {name: one for name, one in values.items() if isinstance(one, str | int | float | bool)}
        yield Arguments(values={name: one[:_MAX_VALUE] if isinstance(one, str) else one for name, one in plain.items()})
    unfinished: list[tuple[int, str]] = []
    finished = 0
    for one in document["requests"][:_MAX_REQUESTS]:
        if not isinstance(one, tuple) or len(one) < 2:
            continue
        asked, answer = _fields(one[0]), _fields(one[1])
        if _fields(answer.get("meta_info")).get("finish_reason"):
            finished += 1
        else:
            ids, text = asked.get("input_ids"), asked.get("text")
            size = len(ids) if isinstance(ids, list) else len(text) // 4 if isinstance(text, str) else 0
            unfinished.append((size, str(asked.get("rid") or "a request")[:80]))
    unfinished.sort(reverse=True)
    told = ", ".join(f"{rid} (about {size} prompt tokens)" for size, rid in unfinished[:_MAX_TOLD])
    yield Dumped(unfinished=len(unfinished), finished=finished, text=told)


def _fields(value: object) -> dict[str, Any]:
    found = value.fields if isinstance(value, _Shell) else value
    return found if isinstance(found, dict) else {}
