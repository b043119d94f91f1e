import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.errors import RefusedError
from sglang_crashkit.installer.record import Record, format_row

TEXT = 'sglang/a.py,sha256=abc,3\n"sglang/with,comma.py",sha256=def,4\nsglang-1.dist-info/RECORD,,\n'


def parse(text: str) -> Record:
    return Record.parse(text.encode(), source="RECORD")


@pytest.mark.parametrize("text", [TEXT, TEXT.removesuffix("\n"), TEXT.replace("\n", "\r\n"), ""])
def test_what_is_not_touched_keeps_its_bytes(text):
    assert parse(text).to_bytes() == text.encode()


@pytest.mark.parametrize("text", [TEXT, TEXT.removesuffix("\n"), TEXT.replace("\n", "\r\n")])
def test_rows_are_rewritten_in_place_added_ahead_and_taken_back_to_the_exact_bytes(text):
    record = parse(text)
    rows = {name: record.format_row(name, b"12345") for name in ("sglang/a.py", "sglang/new.py")}
    changed = record.with_rows(rows)
    assert [row.path for row in changed.rows] == [
        "sglang/new.py",
        "sglang/a.py",
        "sglang/with,comma.py",
        "sglang-1.dist-info/RECORD",
    ]
    assert parse(changed.to_bytes().decode()) == changed
    assert changed.with_rows({name: record.find(name) for name in rows}).to_bytes() == text.encode()


def test_a_row_has_the_hash_and_the_size_as_pip_writes_them():
    assert format_row("a,b", b"x") == '"a,b",sha256=LXEWQrcmsEQBYnyp-6wy9chTD7GQPMTbAiWHF5IaSIE,1\n'
    assert format_row("a", None) == "a,,\n"


@given(st.text(alphabet=st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1))
def test_any_path_reads_back(path):
    assert parse(format_row(path, b"")).find(path) is not None


@pytest.mark.parametrize("data", [b"\xff\xfe", b"\n\n", b'"open,,\n'])
def test_what_is_not_a_record_is_refused_by_name(data):
    with pytest.raises(RefusedError, match="/some/RECORD does not read"):
        Record.parse(data, source="/some/RECORD")
