from __future__ import annotations

from pathlib import Path

import pytest

from sglang_crashkit.incident.null_folder import NowhereFolder
from sglang_crashkit.incident.retention import NoRoomError


def test_evidence_is_refused_with_the_reason_and_nothing_else_is_done(tmp_path: Path) -> None:
    folder = NowhereFolder("no folder took it")
    record = tmp_path / "record"
    record.write_text("mine")
    for write in (
        lambda: folder.write_text("stacks/x.txt", "x"),
        lambda: folder.write_json("stacks/x.json", {}),
        lambda: folder.adopt(record, "ranks/x.json"),
    ):
        with pytest.raises(NoRoomError, match="no folder took it"):
            write()
    assert record.read_text() == "mine"
    folder.save({}, "")
    folder.publish()
    folder.discard()
    assert folder.problem == "no folder took it"
    assert len(folder.id) == 8
