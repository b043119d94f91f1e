from __future__ import annotations

import pytest

from sglang_crashkit.installer.apply import apply, revert
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
