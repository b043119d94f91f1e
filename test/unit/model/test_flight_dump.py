from __future__ import annotations

import contextlib
import copy
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.model import flight_dump
from sglang_crashkit.model.flight_dump import FlightDumpError, Group, GroupStatus, parse_dump, read_dump
from sglang_crashkit.model.sample import Frame
from unit.flight_dumps import BEGAN, document, entry, pickled

ME = os.geteuid()
FRAMES = [("all_reduce", "torch/distributed/distributed_c10d.py", 3906), ("forward", "sglang/srt/model.py", 7)]


def sample() -> dict[str, Any]:
    return document(
        [
            entry(5, 3, frames=FRAMES),
            entry(6, 1, "broadcast", group=("1", "undefined"), state="started"),
            entry(7, 3, "send 0->1", is_message=True, message_sequence=2, state="scheduled"),
        ],
        _1=(0, 2),
    )


def test_all_that_is_of_interest_is_taken_over() -> None:
    dump = parse_dump(pickled(sample()))
    assert dump.version == "2.10"
    assert dump.groups == {"0": Group("0", "default_pg", (0, 1)), "1": Group("1", "", (0, 2))}
    assert dump.status == {"0": GroupStatus(3, -1, 3), "1": GroupStatus(1, -1, -1)}
    first, second, third = dump.entries
    assert (first.record, first.group, first.sequence, first.operation, first.backend) == (
        5,
        "0",
        3,
        "all_reduce",
        "nccl",
    )
    assert (first.state, first.retired, first.is_done, first.is_message) == ("completed", True, True, False)
    assert (first.input_sizes, first.output_sizes, first.dtypes) == (((4, 3),), ((4, 3),), ("BFloat16",))
    assert first.created == pytest.approx(BEGAN + 5)
    assert first.frames == tuple(Frame(*frame) for frame in FRAMES)
    assert (second.group, second.state, second.is_done) == ("1", "started", False)
    assert (third.operation, third.is_message, third.message_sequence) == ("send 0->1", True, 2)
    assert not dump.is_from_the_start


def test_a_process_that_recorded_nothing_has_a_dump_too() -> None:
    empty = document([])
    del empty["entries"]
    dump = parse_dump(pickled(empty))
    assert dump.entries == ()
    assert dump.is_from_the_start


def test_a_cpu_backend_says_that_an_operation_is_over_by_giving_it_up() -> None:
    over = entry(0, 1, backend="gloo", state="scheduled", retired=True)
    given_up = entry(0, 1, backend="nccl", state="scheduled", retired=True)
    assert [one.is_done for one in parse_dump(pickled(document([over, given_up]))).entries] == [True, False]


@pytest.mark.parametrize("version", ["1.0", "3.0", "2", "", "2.x"])
def test_a_dump_of_another_form_is_refused_by_its_version(version: str) -> None:
    with pytest.raises(FlightDumpError, match=f"version '{version}'"):
        parse_dump(pickled(sample() | {"version": version}))


def without(name: str) -> dict[str, Any]:
    value = sample()
    del value["entries"][0][name]
    return value


@pytest.mark.parametrize(
    "name",
    ["process_group", "profiling_name", "state", "record_id", "collective_seq_id", "p2p_seq_id", "input_sizes"],
)
def test_what_is_missing_is_named(name: str) -> None:
    with pytest.raises(FlightDumpError, match=f"it has no '{name}'"):
        parse_dump(pickled(without(name)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("process_group", ["0", "default_pg"]),
        ("process_group", ("0",)),
        ("profiling_name", 7),
        ("state", "finished"),
        ("collective_seq_id", True),
        ("collective_seq_id", 1.0),
        ("input_sizes", [4, 3]),
        ("input_sizes", [["4"]]),
        ("input_sizes", [[-1]]),
        ("input_sizes", [[1 << 63]]),
        ("input_sizes", [[1] * 65]),
        ("frames", [{"name": "f"}]),
        ("frames", ["f"]),
        ("time_created_ns", None),
    ],
)
def test_what_has_another_type_is_refused(name: str, value: object) -> None:
    wrong = sample()
    wrong["entries"][0][name] = value
    with pytest.raises(FlightDumpError, match="no dump of a flight recorder"):
        parse_dump(pickled(wrong))


@pytest.mark.parametrize("value", [None, [], "dump", {"entries": []}, {"version": "2.10"}])
def test_another_pickle_is_no_dump(value: object) -> None:
    with pytest.raises(FlightDumpError, match="no dump of a flight recorder"):
        parse_dump(pickled(value))


def test_a_pickle_that_calls_is_no_dump() -> None:
    with pytest.raises(FlightDumpError, match="builds no plain data"):
        parse_dump(pickle.dumps({"version": os.getcwd}, 2))


LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers()) | st.tuples()


@given(st.data())
def test_a_dump_with_anything_else_in_it_is_read_or_refused(data: st.DataObject) -> None:
    value: Any = copy.deepcopy(sample())
    place = data.draw(st.sampled_from([value, value["pg_config"], value["pg_status"], *value["entries"]]))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(LEAF)
    with contextlib.suppress(FlightDumpError):
        parse_dump(pickled(value))


@given(st.integers(0, 10_000))
def test_half_a_dump_says_that_it_is_cut_off(size: int) -> None:
    whole = pickled(sample())
    with pytest.raises(FlightDumpError) as raised:
        parse_dump(whole[: size % len(whole)])
    assert raised.value.is_cut_off


def test_one_list_in_many_places_is_not_walked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_dump, "_MOST_PARTS", 10_000)
    large = [[1] * 10] * 100
    value = document([entry(number, number) | {"input_sizes": large} for number in range(1000)])
    with pytest.raises(FlightDumpError, match="more than 10000 parts"):
        parse_dump(pickled(value))


def test_more_entries_than_a_recorder_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_dump, "_MOST_ENTRIES", 2)
    with pytest.raises(FlightDumpError, match="more than 2 entries"):
        parse_dump(pickled(sample()))


def test_a_text_that_no_file_would_take_is_made_fit() -> None:
    value = document([entry(0, 1, frames=[("f\udc80", "x" * 1000, 1)])])
    (frame,) = parse_dump(pickled(value)).entries[0].frames
    assert frame.function == "f\\udc80"
    assert len(frame.file) == 500


def test_a_file_is_read_where_it_is_one_of_the_right_user(tmp_path: Path) -> None:
    path = tmp_path / "4711-0"
    path.write_bytes(pickled(sample()))
    assert len(read_dump(path, ME).entries) == 3
    with pytest.raises(FlightDumpError, match=f"is not a file of user {ME + 1}"):
        read_dump(path, ME + 1)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "nothing"])
def test_anything_but_a_regular_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "4711-0"
    if kind == "link":
        (tmp_path / "real").write_bytes(pickled(sample()))
        path.symlink_to(tmp_path / "real")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(FlightDumpError, match=str(path)):
        read_dump(path, ME)


def test_a_file_of_any_size_is_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_dump, "_MOST_BYTES", 1 << 20)
    path = tmp_path / "4711-0"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(FlightDumpError, match="more than 1 MB"):
        read_dump(path, ME)
