"""Read a pickle that holds nothing but plain data, in bounded time and memory.

A pickle is a program, and `pickle.Unpickler` runs all of it: also where no class may be looked up, a few bytes make it
reserve gigabytes. This reader knows only the instructions that build ``dict``, ``list``, ``tuple``, ``str``, ``bytes``,
``int``, ``float``, ``bool`` and ``None``, and refuses all others: those that call, import, or refer to something
outside. Source of the instructions: CPython's ``pickletools``.

One value may stand in several places of the result, also within itself: whoever walks it counts its steps.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

#: As many steps as a few hundred thousand records take; each takes less than a microsecond.
_MOST_STEPS = 4_000_000
#: An empty one takes 64 bytes, of which an instruction of one byte may make one.
_MOST_CONTAINERS = 1_000_000
#: Whole numbers of up to 127 bits; longer ones cost time to be calculated with.
_MOST_INT_BYTES = 16
_PROTOCOLS = range(2, 6)

_U2, _U4, _I4, _U8, _F8 = (struct.Struct(form) for form in ("<H", "<I", "<i", "<Q", ">d"))


class PickleError(Exception):
    """It is no pickle, is cut off, or holds more than plain data; the message says which."""


class CutOffError(PickleError):
    """It ends before it is whole."""


def load_plain(data: bytes) -> Any:
    """Return the one value that `data`, a pickle of protocol 2 to 5, holds.

    Raises:
        PickleError: it is none, or holds more than plain data or more of it than a reader would bear.
    """
    return _Reader(data).read()


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._containers = 0

    def read(self) -> Any:
        data, size = self._data, len(self._data)
        if size < 2:
            raise CutOffError(f"it is cut off after {size} bytes")
        if data[0] != 0x80 or data[1] not in _PROTOCOLS:
            raise PickleError("it is no pickle")
        self._at = 2
        for _step in range(_MOST_STEPS):
            if self._at >= size:
                raise CutOffError(f"it is cut off after {size} bytes")
            code = data[self._at]
            self._at += 1
            if code == 0x68 and self._at < size and data[self._at] in self._memo:
                # Most of a file refers to texts that stood in it before: without a call it is read twice as fast.
                self._stack.append(self._memo[data[self._at]])
                self._at += 1
                continue
            if code == 0x2E:  # STOP
                return self._result()
            act = _ACTS.get(code)
            if act is None:
                raise PickleError(f"byte {self._at - 1} is {bytes([code])!r}, which builds no plain data")
            act(self)
        raise PickleError(f"it has more than {_MOST_STEPS} steps")

    def _result(self) -> Any:
        if self._at != len(self._data):
            raise PickleError(f"{len(self._data) - self._at} bytes follow its end")
        if len(self._stack) != 1 or self._below:
            raise PickleError("it leaves more or less than one value")
        return self._stack[0]

    # -- what it is made of

    def _take(self, size: int) -> bytes:
        start, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise CutOffError(f"it is cut off after {len(self._data)} bytes")
        return self._data[start : self._at]

    def _number(self, form: struct.Struct) -> Any:
        return form.unpack(self._take(form.size))[0]

    def _pop(self) -> Any:
        if not self._stack:
            raise PickleError(f"byte {self._at - 1} needs a value where there is none")
        return self._stack.pop()

    def _top(self, kind: type) -> Any:
        if not self._stack or type(self._stack[-1]) is not kind:
            raise PickleError(f"byte {self._at - 1} needs a {kind.__name__} where there is none")
        return self._stack[-1]

    def _pop_to_mark(self) -> list[Any]:
        if not self._below:
            raise PickleError(f"byte {self._at - 1} needs a mark where there is none")
        items, self._stack = self._stack, self._below.pop()
        return items

    def _push_container(self, value: Any) -> None:
        self._containers += 1
        if self._containers > _MOST_CONTAINERS:
            raise PickleError(f"it has more than {_MOST_CONTAINERS} lists, tuples and dictionaries")
        self._stack.append(value)

    # -- the instructions

    def frame(self) -> None:
        # How far the next part of the file goes, which is all there already.
        self._take(_U8.size)

    def mark(self) -> None:
        self._containers += 1
        if self._containers > _MOST_CONTAINERS:
            raise PickleError(f"it has more than {_MOST_CONTAINERS} marks")
        self._below.append(self._stack)
        self._stack = []

    def pop_mark(self) -> None:
        self._pop_to_mark()

    def put(self, form: struct.Struct | None) -> None:
        number = len(self._memo) if form is None else self._number(form)
        if not self._stack:
            raise PickleError(f"byte {self._at - 1} needs a value where there is none")
        self._memo[number] = self._stack[-1]

    def get(self, form: struct.Struct) -> None:
        number = self._number(form)
        if number not in self._memo:
            raise PickleError(f"there is no value number {number}")
        self._stack.append(self._memo[number])

    def text(self, form: struct.Struct) -> None:
        try:
            # A path that is not UTF-8 is written with surrogates.
            self._stack.append(self._take(self._number(form)).decode(errors="surrogatepass"))
        except UnicodeDecodeError as error:
            raise PickleError(f"a text in it is not UTF-8: {error.reason}") from None

    def octets(self, form: struct.Struct) -> None:
        self._stack.append(self._take(self._number(form)))

    def number(self, form: struct.Struct) -> None:
        self._stack.append(self._number(form))

    def byte(self) -> None:
        self._stack.append(self._take(1)[0])

    def long(self) -> None:
        size = self._take(1)[0]
        if size > _MOST_INT_BYTES:
            raise PickleError(f"a number in it has {size} bytes")
        self._stack.append(int.from_bytes(self._take(size), "little", signed=True))

    def constant(self, value: object) -> None:
        self._stack.append(value)

    def tuple_of(self, count: int) -> None:
        items = [self._pop() for _ in range(count)]
        self._push_container(tuple(reversed(items)))

    def tuple_to_mark(self) -> None:
        items = self._pop_to_mark()
        self._push_container(tuple(items))

    def empty_list(self) -> None:
        self._push_container([])

    def empty_dict(self) -> None:
        self._push_container({})

    def append(self) -> None:
        item = self._pop()
        self._top(list).append(item)

    def appends(self) -> None:
        items = self._pop_to_mark()
        self._top(list).extend(items)

    def set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._set(self._top(dict), key, value)

    def set_items(self) -> None:
        items = self._pop_to_mark()
        target = self._top(dict)
        if len(items) % 2:
            raise PickleError("a dictionary in it has a key without a value")
        for position in range(0, len(items), 2):
            self._set(target, items[position], items[position + 1])

    def _set(self, target: dict[str, Any], key: object, value: object) -> None:
        # Numbers can be chosen so that all fall on one place of the table, which is filled in quadratic time then.
        if type(key) is not str:
            raise PickleError(f"a key in it is a {type(key).__name__}, not a text")
        target[key] = value


def _with(act: Callable[..., None], *args: object) -> Callable[[_Reader], None]:
    return lambda reader: act(reader, *args)


_U1 = struct.Struct("<B")
_ACTS: dict[int, Callable[[_Reader], None]] = {
    0x95: _Reader.frame,
    0x28: _Reader.mark,
    0x31: _Reader.pop_mark,
    0x94: _with(_Reader.put, None),
    0x71: _with(_Reader.put, _U1),
    0x72: _with(_Reader.put, _U4),
    0x68: _with(_Reader.get, _U1),
    0x6A: _with(_Reader.get, _U4),
    0x8C: _with(_Reader.text, _U1),
    0x58: _with(_Reader.text, _U4),
    0x8D: _with(_Reader.text, _U8),
    0x43: _with(_Reader.octets, _U1),
    0x42: _with(_Reader.octets, _U4),
    0x8E: _with(_Reader.octets, _U8),
    0x4B: _Reader.byte,
    0x4D: _with(_Reader.number, _U2),
    0x4A: _with(_Reader.number, _I4),
    0x47: _with(_Reader.number, _F8),
    0x8A: _Reader.long,
    0x4E: _with(_Reader.constant, None),
    0x88: _with(_Reader.constant, True),
    0x89: _with(_Reader.constant, False),
    0x29: _with(_Reader.tuple_of, 0),
    0x85: _with(_Reader.tuple_of, 1),
    0x86: _with(_Reader.tuple_of, 2),
    0x87: _with(_Reader.tuple_of, 3),
    0x74: _Reader.tuple_to_mark,
    0x5D: _Reader.empty_list,
    0x7D: _Reader.empty_dict,
    0x61: _Reader.append,
    0x65: _Reader.appends,
    0x73: _Reader.set_item,
    0x75: _Reader.set_items,
}
