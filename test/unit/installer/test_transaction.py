from __future__ import annotations

import pytest

from sglang_crashkit.errors import CrashkitError, PartialError
from sglang_crashkit.installer.files import FileOps, staged_name, undo_name
from sglang_crashkit.installer.transaction import Change, Plan, Transaction
from unit.installer.fake_sglang import snapshot


@pytest.fixture
def plan(tmp_path) -> Plan:
    (tmp_path / "a.py").write_text("a")
    (tmp_path / "b.py").write_text("b")
    changes = (
        Change(tmp_path / "a.py", b"a", b"A"),
        Change(tmp_path / "b.py", b"b", None),
        Change(tmp_path / "sub/c.py", None, b"C"),
    )
    touched = tuple(change.path for change in changes)
    return Plan(changes, touched, tmp_path / "state", b"during", b"final", {tmp_path / "kept/a.py": b"a"})


def test_all_of_it_holds(plan, tmp_path):
    Transaction(plan, FileOps()).run()
    found = {name: data for name, data in snapshot(tmp_path).items() if data != b"folder"}
    assert found == {"a.py": b"A", "sub/c.py": b"C", "state": b"final", "kept/a.py": b"a"}


def test_a_file_that_another_writes_meanwhile_undoes_everything(plan, tmp_path):
    before = snapshot(tmp_path)

    def interfere(step: str) -> None:
        if step == "replace c.py":
            (tmp_path / "a.py").write_text("theirs")

    with pytest.raises(CrashkitError, match=r"a\.py did not keep what was written to it; nothing was changed"):
        Transaction(plan, FileOps(interfere)).run()
    assert snapshot(tmp_path) == before


def test_an_interrupt_from_the_keyboard_undoes_everything(plan, tmp_path):
    before = snapshot(tmp_path)

    def interrupt(step: str) -> None:
        if step == "replace c.py":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Transaction(plan, FileOps(interrupt)).run()
    assert snapshot(tmp_path) == before


def test_an_undoing_that_fails_too_says_so_and_keeps_the_state_file(plan, tmp_path):
    def fail(step: str) -> None:
        if step in ("replace c.py", "replace a.py") and (tmp_path / "a.py").read_text() == "A":
            raise OSError(5, "Input/output error")

    with pytest.raises(PartialError, match="the change failed, and so did undoing it") as caught:
        Transaction(plan, FileOps(fail)).run()
    assert "sglang-crashkit status" in caught.value.next_step
    assert (tmp_path / "state").read_bytes() == b"during"


def test_what_an_earlier_change_left_under_other_names_goes(plan, tmp_path):
    for path in (tmp_path / "a.py", tmp_path / "state"):
        staged_name(path).write_text("left over")
        undo_name(path).write_text("left over")
    Transaction(plan, FileOps()).run()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
