"""Dumps of requests that SGLang wrote, and files that only look like one: nothing in them is carried out."""

from __future__ import annotations

import gzip
import os
import pickle
import tracemalloc
from pathlib import Path

import pytest

from sglang_crashkit.model.case import case_of
from sglang_crashkit.sources.text.crash_dumps import events_of
from sglang_crashkit.sources.text.reader import read

#: Written by SGLang 0.5.23's own classes: one request with an answer, two without.
REAL = Path(__file__).parent / "crash_dump" / "crash_dump_0.5.23.pkl.gz"


def test_a_real_dump_tells_arguments_and_the_requests_in_flight() -> None:
    case = case_of(read([REAL]))
    assert case.arguments["tp_size"] == 2
    assert case.arguments["model_path"].startswith("/models/tiny")
    (dumped,) = case.dumped
    assert (dumped.unfinished, dumped.finished) == (2, 1)
    assert dumped.text == f"{'b' * 32} (about 600 prompt tokens), {'c' * 32} (about 80 prompt tokens)"


class _Runs:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch ran",)


def test_nothing_in_a_dump_is_carried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [*events_of(pickle.dumps({"server_args": _Runs(), "requests": []}))]
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04}\x96" + (1 << 40).to_bytes(8, "little") + b"server_args.",  # a byte array of a terabyte
        b"\x80\x04}r\xff\xff\xff\x7f0server_args",  # a far place of the memo
        b"\x80\x04" + b"]" * 100_000 + b"server_args",
        pickle.dumps({"server_args": None, "requests": 7}),
        pickle.dumps(["server_args"]),
        gzip.decompress(REAL.read_bytes())[:9000],
    ],
)
def test_what_is_no_dump_is_said_to_be_none(data: bytes, tmp_path: Path) -> None:
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"\w"):
        list(events_of(data))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 32 << 20
    path = tmp_path / "crash_dump.pkl"
    path.write_bytes(data)
    assert not case_of(read([path])).dumped
