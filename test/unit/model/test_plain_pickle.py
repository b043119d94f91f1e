from __future__ import annotations

import contextlib
import math
import os
import pickle
import struct
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.model import plain_pickle
from sglang_crashkit.model.plain_pickle import CutOffError, PickleError, load_plain

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**100), 2**100)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=()))
)


def values_of(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return what holds such leaves."""
    return st.recursive(
        leaves,
        lambda children: st.lists(children) | st.lists(children).map(tuple) | st.dictionaries(st.text(), children),
        max_leaves=30,
    )


VALUES = values_of(LEAVES | st.binary())
PROTOCOLS = pytest.mark.parametrize("protocol", [2, 3, 4, 5])
MEGABYTE = 1 << 20


def same(left: Any, right: Any) -> bool:
    """Say whether two values are equal and of the same types: 1, 1.0 and True are not."""
    return repr(left) == repr(right)


@given(VALUES, st.integers(3, 5))
def test_what_pickle_writes_is_read(value: Any, protocol: int) -> None:
    assert same(load_plain(pickle.dumps(value, protocol)), value)


@given(values_of(LEAVES))
def test_what_the_oldest_protocol_writes_is_read(value: Any) -> None:
    assert same(load_plain(pickle.dumps(value, 2)), value)


def test_bytes_are_a_call_in_the_oldest_protocol() -> None:
    with pytest.raises(PickleError, match="builds no plain data"):
        load_plain(pickle.dumps(b"", 2))


@given(VALUES, st.integers(2, 5), st.data())
def test_a_part_of_a_pickle_is_none(value: Any, protocol: int, data: st.DataObject) -> None:
    whole = pickle.dumps(value, protocol)
    with pytest.raises(PickleError):
        load_plain(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(PickleError):
        load_plain(whole + b".")


@given(st.binary(), st.integers(2, 5))
def test_whatever_the_bytes_are_there_is_a_value_or_the_one_error(data: bytes, protocol: int) -> None:
    for bytes_ in (data, bytes([0x80, protocol]) + data, bytes([0x80, protocol]) + data + b"."):
        with contextlib.suppress(PickleError):
            load_plain(bytes_)


@given(VALUES, st.integers(0, 10_000), st.binary(min_size=1, max_size=4))
def test_a_pickle_with_other_bytes_in_it_is_read_or_refused(value: Any, at: int, other: bytes) -> None:
    whole = bytearray(pickle.dumps(value, 2))
    at = 2 + at % (len(whole) - 2)
    whole[at : at + len(other)] = other
    with contextlib.suppress(PickleError):
        load_plain(bytes(whole))


class Call:
    """Has itself called when it is unpickled."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call[0], self._call[1:]


class Plain:
    """An object with an attribute."""


def persistent() -> bytes:
    return b"\x80\x02X\x01\x00\x00\x00aQ."


def extension() -> bytes:
    return b"\x80\x02\x82\x01."


@PROTOCOLS
@pytest.mark.parametrize("value", [Call(os.mkdir, "made"), Plain(), os.mkdir, {1, 2}, 1j, [Plain()]])
def test_nothing_is_called_or_imported(
    protocol: int, value: object, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PickleError, match="builds no plain data"):
        load_plain(pickle.dumps(value, protocol))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("data", [persistent(), extension(), b"\x80\x02cos\nmkdir\n.", b"\x80\x02(I1\nI2\ni"])
def test_instructions_that_reach_out_are_refused(data: bytes) -> None:
    with pytest.raises(PickleError, match="builds no plain data"):
        load_plain(data)


@pytest.mark.parametrize("data", [b"", b"\x80", b"PK\x03\x04", b"\x7fELF", b"{}", b"\x80\x01N.", b"\x80\x06N."])
def test_another_file_is_no_pickle(data: bytes) -> None:
    with pytest.raises(PickleError, match=r"it is (no pickle|cut off)"):
        load_plain(data)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02.",
        b"\x80\x02NN.",
        b"\x80\x02(N.",
        b"\x80\x02a.",
        b"\x80\x02Na.",
        b"\x80\x02]s.",
        b"\x80\x02]Ns.",
        b"\x80\x02e.",
        b"\x80\x02(e.",
        b"\x80\x02N(Ne.",
        b"\x80\x02}(Nu.",
        b"\x80\x02}NNs.",
        b"\x80\x02}K\x01Ns.",
        b"\x80\x02h\x00.",
        b"\x80\x02q\x00.",
        b"\x80\x02\x86.",
        b"\x80\x02X\x01\x00\x00\x00\xff.",
    ],
)
def test_what_makes_no_sense_is_refused(data: bytes) -> None:
    with pytest.raises(PickleError):
        load_plain(data)


def test_cut_off_is_told_from_wrong() -> None:
    whole = pickle.dumps({"a": [1.5, "text"]}, 2)
    for end in range(2, len(whole)):
        with pytest.raises(CutOffError):
            load_plain(whole[:end])


def test_one_value_may_stand_in_several_places_also_in_itself() -> None:
    value: list[Any] = [{}]
    value.append(value)
    value.append(value[0])
    read = load_plain(pickle.dumps(value, 2))
    assert read[1] is read
    assert read[2] is read[0]


def huge_number() -> bytes:
    return b"\x80\x02\x8a\xff" + b"\x7f" * 255 + b"."


#: What `few` leaves of the limits.
STEPS, CONTAINERS = 40_000, 10_000

BOMBS = {
    "a far memo": b"\x80\x02Nr\xff\xff\xff\xff0.",
    "a far memo that stays": b"\x80\x02Nr\xff\xff\xff\xff.",
    "a long text that is not there": b"\x80\x02X\xff\xff\xff\xff.",
    "a longer text that is not there": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b".",
    "a huge number": huge_number(),
    "many dictionaries": b"\x80\x02](" + b"}" * STEPS + b"e.",
    "many marks": b"\x80\x02" + b"(" * STEPS + b".",
    "much of nothing": b"\x80\x02](" + b"N" * 100 * STEPS + b"e.",
    "a deep nest": b"\x80\x02" + b"]" * CONTAINERS + b"a" * (CONTAINERS - 1) + b".",
    "lists of twice the one before": b"\x80\x02]q\x00"
    + b"".join(b"](h" + bytes([number]) * 2 + b"eq" + bytes([number + 1]) for number in range(60))
    + b".",
}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the limits to a hundredth, so that the tests take a hundredth of their time."""
    assert (plain_pickle._MOST_STEPS, plain_pickle._MOST_CONTAINERS) == (100 * STEPS, 100 * CONTAINERS)
    monkeypatch.setattr(plain_pickle, "_MOST_STEPS", STEPS)
    monkeypatch.setattr(plain_pickle, "_MOST_CONTAINERS", CONTAINERS)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_takes_no_more_than_a_large_file(name: str) -> None:
    tracemalloc.start()
    try:
        with contextlib.suppress(PickleError):
            load_plain(BOMBS[name])
        _now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 256 * MEGABYTE / 100


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("name", ["many dictionaries", "many marks", "much of nothing"])
def test_more_than_a_reader_would_bear_is_refused(name: str) -> None:
    with pytest.raises(PickleError, match="it has more than"):
        load_plain(BOMBS[name])


def test_numbers_keep_their_kind_and_sign() -> None:
    numbers = [0, 255, 256, 65535, 65536, -1, -(2**31), 2**31, 2**63, -(2**63), 1.5, -math.inf, True, False]
    assert same(load_plain(pickle.dumps(numbers, 2)), numbers)
