from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_crashkit.errors import UsageError
from sglang_crashkit.watch.api_key import read_api_key


@pytest.mark.parametrize("content", ["sk-123", "sk-123\n", " sk-123 \r\n"])
def test_the_key_is_the_only_line_of_a_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "key"
    path.write_text(content)
    assert read_api_key(path) == "sk-123"


def test_it_may_come_through_a_pipe() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"sk-123\n")
    os.close(writing)
    try:
        assert read_api_key(Path(f"/dev/fd/{reading}")) == "sk-123"
    finally:
        os.close(reading)


@pytest.mark.parametrize("content", [b"", b" \n", b"two\nlines", b"a\x00b", b"\xff\xfe", b"x" * 5000])
def test_what_is_no_key_is_refused_and_not_shown(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(UsageError) as raised:
        read_api_key(path)
    assert str(path) in str(raised.value)
    assert "lines" not in str(raised.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_api_key(tmp_path / "key")
