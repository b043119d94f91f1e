"""`scripts/port_release` on a small SGLang whose next release moved a hook."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

from sglang_crashkit.installer.porting import find_conflicts
from unit.installer.fake_sglang import FILES, write_wheel

SCRIPT = Path(__file__).parents[3] / "scripts" / "port_release"
NEXT = FILES | {"srt/first.py": b"import os\n\n\nclass A:\n    def run():\n        return os.getpid()\n"}


@pytest.fixture
def port_release(kit, wheel, tmp_path, monkeypatch, capsys):
    """Run the script on the patches of `kit` with a cache of its own."""
    loader = importlib.machinery.SourceFileLoader("port_release", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("port_release", loader))
    loader.exec_module(module)
    monkeypatch.setattr(module, "PATCHES", kit.patches.root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache = tmp_path / "cache/sglang-crashkit/wheels"
    write_wheel(cache, "0.5.10", NEXT)
    shutil.copy(wheel, cache)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["port_release", *arguments])
        code = module.main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_only_the_patch_that_fails_is_written_with_what_became_of_its_lines(port_release, kit):
    code, out, err = port_release("0.5.10")
    assert code == 5
    assert "0.5.10: 2 of 3 patches apply as they are" in out
    assert "srt/first.py (0.5.9/srt/first.py.patch)\n    hunk 2: its 1 old lines stand nowhere" in out
    assert "delete the '# PORT:' lines" in err
    written = [path.relative_to(kit.patches.root).as_posix() for path in (kit.patches.root / "0.5.10").rglob("*.patch")]
    assert written == ["0.5.10/srt/first.py.patch"]
    draft = (kit.patches.root / written[0]).read_text()
    assert "# PORT: its 1 old lines stand nowhere\n# PORT: line 5 with other indentation: def run():\n" in draft
    assert "0.5.10" not in json.loads((kit.patches.root / "releases.lock.json").read_text())["releases"]
    code, _, err = port_release("0.5.10")
    assert (code, "still has '# PORT:' lines" in err) == (5, True)


def test_once_the_draft_is_edited_the_lock_has_the_release(port_release, kit):
    port_release("0.5.10")
    file = kit.patches.root / "0.5.10/srt/first.py.patch"
    lines = [line for line in file.read_text().splitlines(keepends=True) if not line.startswith("# PORT:")]
    text = "".join(lines).replace(" def run():\n+    ExitCode()\n", "     def run():\n+        ExitCode()\n")
    file.write_text(text)
    code, out, _ = port_release("0.5.10")
    assert (code, "0.5.10: 3 of 3 patches apply as they are" in out) == (0, True)
    assert "2 releases; the lock was rewritten" in out
    lock = json.loads((kit.patches.root / "releases.lock.json").read_text())["releases"]
    assert lock["0.5.10"]["files"]["srt/first.py"]["patch"] == "0.5.10/srt/first.py.patch"
    assert lock["0.5.10"]["files"]["srt/deep/second.py"]["patch"] == "0.5.9/srt/deep/second.py.patch"
    assert "the lock is as it was" in port_release("--lock")[1]


def test_what_is_not_a_release_is_refused(port_release):
    assert port_release("next")[0] == 2
    assert port_release()[0] == 2


def test_a_hunk_that_stands_twice_says_where(kit, tmp_path):
    twice = FILES | {"srt/first.py": FILES["srt/first.py"] + b"import os\n"}
    (conflict,) = find_conflicts(kit.patches, "0.5.10", write_wheel(tmp_path, "0.5.10", twice))
    assert b"# PORT: its 1 old lines stand at 2 places\n" in conflict.draft
    assert b"# PORT: the whole hunk stands at lines 1, 6\n" in conflict.draft
