from __future__ import annotations

import contextlib
import copy
import os
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.model import flight_dump
from sglang_crashkit.model.flight_dump import FlightDumpError, Group, load_plain, parse_dump
from sglang_crashkit.model.sample import Frame
from unit.support.flight_dumps import BEGAN, document, entry, pickled
from unit.support.stored import GONE, changed

FRAMES = [("all_reduce", "torch/distributed/distributed_c10d.py", 3906), ("forward", "sglang/srt/model.py", 7)]


def sample() -> dict[str, Any]:
    return document(
        [
            entry(5, 3, frames=FRAMES),
            entry(6, 1, "broadcast", group=("1", "undefined"), state="started"),
            entry(7, 3, "send 0->1", is_message=True, state="scheduled"),
        ],
        _1=(0, 2),
    )


def test_all_that_is_of_interest_is_taken_over() -> None:
    dump = parse_dump(pickled(sample()))
    assert dump.groups == {"0": Group("default_pg", (0, 1)), "1": Group("", (0, 2))}
    # A message is not one.
    first, second = dump.entries
    assert (first.group, first.sequence, first.operation, first.is_done) == ("0", 3, "all_reduce", True)
    assert (first.input_sizes, first.dtypes) == (((4, 3),), ("BFloat16",))
    assert first.created == pytest.approx(BEGAN + 5)
    assert first.frames == tuple(Frame(*frame) for frame in FRAMES)
    assert (second.group, second.is_done) == ("1", False)
    assert not dump.is_from_the_start


def test_a_process_that_recorded_nothing_has_a_dump_too() -> None:
    empty = document([])
    del empty["entries"]
    dump = parse_dump(pickled(empty))
    assert dump.entries == ()
    assert dump.is_from_the_start


def test_a_cpu_backend_retires_an_operation_that_is_over() -> None:
    over = entry(0, 1, backend="gloo", state="scheduled", retired=True)
    given_up = entry(0, 1, backend="nccl", state="scheduled", retired=True)
    assert [one.is_done for one in parse_dump(pickled(document([over, given_up]))).entries] == [True, False]


#: What is changed, to what, and what is said of it.
WRONG = [
    *[("version", version, f"version '{version}'") for version in ("1.0", "3.0", "2", "", "2.x")],
    *[
        (f"entries.0.{name}", GONE, f"missing required field `{name}`")
        for name in ("process_group", "profiling_name", "state", "record_id", "collective_seq_id")
    ],
    ("entries.0.process_group", ("0",), "length 2"),
    ("entries.0.state", "finished", "Invalid enum value"),
    ("entries.0.collective_seq_id", True, "Expected `int`, got `bool`"),
    ("entries.0.input_sizes", [4, 3], "Expected `array`"),
    *[("entries.0.input_sizes", [sizes], "Expected `") for sizes in ([-1], [1 << 63], [1] * 65)],
    ("entries.0.frames", [{"name": "f"}], "missing required field `filename`"),
]


@pytest.mark.parametrize(("path", "value", "words"), WRONG)
def test_a_dump_of_another_form_is_refused_with_the_reason(path: str, value: object, words: str) -> None:
    with pytest.raises(FlightDumpError, match=f"no dump of a flight recorder: .*{words}"):
        parse_dump(pickled(changed(sample(), path, value)))


@pytest.mark.parametrize("value", [None, [], "dump", {"entries": []}, {"version": "2.10"}])
def test_another_pickle_is_no_dump(value: object) -> None:
    with pytest.raises(FlightDumpError, match="no dump of a flight recorder"):
        parse_dump(pickled(value))


class Call:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("made",)


HOSTILE = {
    "calls": pickle.dumps({"version": Call()}, 2),
    "imports": pickle.dumps(os.getcwd, 2),
    "a set": pickle.dumps({1, 2}, 2),
    "refers outside": b"\x80\x02X\x01\0\0\0aQ.",
    "an extension": b"\x80\x02\x82\x01.",
    "another protocol": pickle.dumps({}, 4),
    "no pickle": b"PK\x03\x04",
    "a key that is no text": pickle.dumps({(1, 2): 1}, 2),
    "a far memo": b"\x80\x02Nr\xff\xff\xff\xff",
    "a long text that is not there": b"\x80\x02X\xff\xff\xff\xff.",
    "no value": b"\x80\x02.",
    "no list": b"\x80\x02Na.",
    "no text": b"\x80\x02X\x01\0\0\0\xff.",
    "more behind it": pickle.dumps({}, 2) + b".",
    "many containers": b"\x80\x02](" + b"}" * 2_000_000 + b"e.",
    "deep": b"\x80\x02" + b"]" * 10_000 + b"a" * 9_999 + b".",
    "twice the one before": b"\x80\x02]q\x00"
    + b"".join(b"](h" + bytes([number]) * 2 + b"eq" + bytes([number + 1]) for number in range(60))
    + b".",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_pickle_is_refused_and_takes_little_memory(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tracemalloc.start()
    try:
        with pytest.raises(FlightDumpError, match="no dump"):
            parse_dump(data)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert list(tmp_path.iterdir()) == []


@given(st.binary())
def test_any_bytes_give_a_value_or_the_one_error(data: bytes) -> None:
    for bytes_ in (data, b"\x80\x02" + data, b"\x80\x02" + data + b"."):
        with contextlib.suppress(FlightDumpError):
            load_plain(bytes_)


LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers()) | st.tuples()


@given(st.data())
def test_a_dump_with_anything_in_it_is_read_or_refused(data: st.DataObject) -> None:
    value: Any = copy.deepcopy(sample())
    place = data.draw(st.sampled_from([value, value["pg_config"], *value["entries"]]))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(LEAF)
    with contextlib.suppress(FlightDumpError):
        parse_dump(pickled(value))


@given(st.integers(0, 10_000))
def test_half_a_dump_says_that_it_is_cut_off(size: int) -> None:
    whole = pickled(sample())
    with pytest.raises(FlightDumpError) as raised:
        parse_dump(whole[: size % len(whole)])
    assert raised.value.is_cut_off


def test_more_than_a_recorder_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_dump, "MAX_PARTS", 20)
    with pytest.raises(FlightDumpError, match="more than 20 parts"):
        parse_dump(pickled(sample()))


def test_a_text_that_no_file_would_take_is_made_fit() -> None:
    value = document([entry(0, 1, frames=[("f\udc80", "x" * 1000, 1)])])
    (frame,) = parse_dump(pickled(value)).entries[0].frames
    assert frame.function == "f\\udc80"
    assert len(frame.file) == 500
