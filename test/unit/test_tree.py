"""How the tree is kept: short names of tests, flat folders, a file of tests for each module."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE, UNIT, LIVE = ROOT / "python" / "sglang_crashkit", ROOT / "test" / "unit", ROOT / "test" / "integration"
MAX_WORDS = 10
MAX_FILES = 16
#: Modules that hold nothing but data types and tables: those that use them are tested.
DATA = {"capture/cuda_core/model.py", "handler/state.py"}
#: Modules that are tested with others, by the file that does: a program that another module runs as a child, a thin
#: command on what has tests of its own, hooks of the two sides of one thing.
TESTED_IN = {
    "__main__.py": "cli/test_running.py",
    "analysis/causes/no_progress.py": "analysis/causes/test_rules.py",
    "capture/gpu_facts_child.py": "capture/test_gpu_facts.py",
    "cli/commands/apply.py": "installer/test_commands.py",
    "cli/commands/bisect.py": "replay/test_bisect.py",
    "cli/commands/replay.py": "replay/test_replay.py",
    "cli/commands/wheel.py": "installer/test_commands.py",
    "cli/reporters/collected.py": "cli/commands/test_collect.py",
    "cli/reporters/incident_text.py": "cli/commands/test_show.py",
    "installer/probe.py": "installer/test_environment.py",
    "srt/disaggregation/common/conn.py": "srt/disaggregation/test_views.py",
    "srt/disaggregation/decode.py": "srt/disaggregation/test_views.py",
    "srt/disaggregation/prefill.py": "srt/disaggregation/test_views.py",
    "srt/managers/detokenizer_manager.py": "srt/test_exception_record.py",
}


def own_file_of(module: str) -> str:
    """Return the file of tests that a module is to have."""
    folder, _slash, name = module.rpartition("/")
    return f"{folder}/test_{name}".lstrip("/")


def test_a_test_is_named_in_ten_words_at_most() -> None:
    names = {
        (str(path.relative_to(ROOT)), node.name)
        for path in (ROOT / "test").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert names
    assert {each for each in names if len(each[1].split("_")) - 1 > MAX_WORDS} == set()


@pytest.mark.parametrize("top", [PACKAGE, UNIT, LIVE], ids=["package", "unit tests", "integration"])
def test_no_folder_has_too_many_files(top: Path) -> None:
    folders = Counter(path.parent for path in top.rglob("*.*") if path.is_file() and path.suffix != ".pyc")
    assert folders
    assert {str(folder.relative_to(ROOT)) for folder, count in folders.items() if count > MAX_FILES} == set()


def test_each_module_has_a_file_of_tests() -> None:
    modules = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}
    assert modules >= DATA | TESTED_IN.keys()
    without = {module for module in modules if not (UNIT / own_file_of(module)).is_file()}
    assert without == DATA | TESTED_IN.keys()
    assert {path for path in TESTED_IN.values() if not (UNIT / path).is_file()} == set()
