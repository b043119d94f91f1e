from __future__ import annotations

import pytest

from sglang_crashkit.installer.apply import apply, revert
from sglang_crashkit.installer.record import format_row, rewrite_record
from sglang_crashkit.installer.status import Overall
from unit.installer.fake_sglang import overall


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: [*rows[:-1], rows[-1].removesuffix("\n")],
        lambda rows: [row.replace("\n", "\r\n") for row in rows],
        lambda rows: [row for row in rows if "first.py" not in row],
        lambda rows: [row.partition(",")[0] + ",,\n" if "first.py" in row else row for row in rows],
        lambda rows: ['"sglang/with,comma.py",sha256=abc,3\n', *rows],
        lambda rows: [],
    ],
    ids=["no-line-end", "dos", "unlisted", "without-hash", "quoted", "empty"],
)
def test_any_record_comes_back_with_pips_own_later_additions(environment, kit, change):
    record, added = environment.dist_info / "RECORD", b"sglang/__pycache__/x.pyc,,\n"
    before = "".join(change(record.read_text().splitlines(keepends=True))).encode()
    record.write_bytes(before)
    apply(environment, kit.patches, kit.lock)
    assert overall(environment, kit) is Overall.PATCHED
    assert (b"sglang/srt/first.py" in record.read_bytes()) == (b"sglang/srt/first.py" in before)
    record.write_bytes(added + record.read_bytes())
    revert(environment, kit.patches, kit.lock)
    assert record.read_bytes() == added + before


def test_a_row_keeps_its_algorithm_and_pips_form_of_hash():
    assert format_row("a,b", b"x") == '"a,b",sha256=LXEWQrcmsEQBYnyp-6wy9chTD7GQPMTbAiWHF5IaSIE,1\n'
    rewritten = rewrite_record(b"a,sha512=x,9\r\n", {"a": b""}, {"k": None}, is_kits=lambda _path: False, source="R")
    assert rewritten.startswith(b"k,,\r\na,sha512=z4PhNX7vuL3xVChQ1m2AB9Yg5AULVxXcg_SpIdNs6c5H0NE8XYXysP-")
    assert rewritten.endswith(b",0\r\n")
