import pytest

from sglang_crashkit.errors import RefusedError
from sglang_crashkit.installer.state import APPLIED, BY_COMMAND, STATE_NAME, PatchedFile, State, load_state


def test_what_is_written_reads_back(tmp_path):
    files = {"srt/a.py": PatchedFile("1", "2", "3"), "srt/n.py": PatchedFile(None, "4")}
    state = State(APPLIED, BY_COMMAND, "0.1.0", "0.5.9", files, {"sglang/srt/a.py": "row\r\n", "x": None}, ("srt/new",))
    (tmp_path / STATE_NAME).write_bytes(state.dump())
    assert load_state(tmp_path, reinstall="reinstall") == state
    assert load_state(tmp_path / "none", reinstall="reinstall") is None


def test_the_state_of_a_newer_kit_is_left_to_it(tmp_path):
    (tmp_path / STATE_NAME).write_text('{"schema_version": 2}')
    with pytest.raises(RefusedError, match="a newer kit patched this SGLang") as caught:
        load_state(tmp_path, reinstall="the reinstall command")
    assert caught.value.next_step == "revert with that kit, or the reinstall command"
