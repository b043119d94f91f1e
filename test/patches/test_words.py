"""What the kit logs and raises where a release lacks a module can be searched for by the words of later releases."""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import sglang_crashkit

pytestmark = pytest.mark.wheels

KIT = Path(sglang_crashkit.__file__).parent
DIAGNOSTICS = "srt/utils/cudacore_pyspy_dump_utils.py"
#: Where a program fills something in; see the "printf-style" formatting of Python's library reference.
_FILLED = re.compile(r"%[-.\d]*[sdrif]|\{\}")
_LEVELS = ("debug", "info", "warning", "error", "exception")


def skeleton(node: ast.AST) -> str | None:
    """Return a text with ``{}`` for what is filled in; None of what is no text."""
    if isinstance(node, ast.JoinedStr):
        parts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values]
        return "".join(parts)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _FILLED.sub("{}", node.value).replace("%%", "%")
    return None


def texts_told(tree: ast.AST) -> Iterator[str]:
    """Yield what a program logs, and the messages of what it raises."""
    for node in ast.walk(tree):
        told = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LEVELS:
            told = node if ast.unparse(node.func.value) == "logger" else None
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            told = node.exc
        text = skeleton(told.args[0]) if told is not None and told.args else None
        if text is not None:
            yield text


def texts_of_kit(path: str) -> list[str]:
    tree = ast.parse((KIT / path).read_text())
    return [text for text in map(skeleton, ast.walk(tree)) if text is not None]


def functions(source: bytes, names: Sequence[str]) -> Iterator[ast.AST]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds) and node.name in names)


@pytest.fixture(scope="module")
def archive(wheels, release) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(wheels[release]) as opened:
        yield opened


def missing(told: Sequence[str], path: str) -> list[str]:
    kit = texts_of_kit(path)
    return [text for text in told if not any(text in one for one in kit)]


def test_the_diagnostics_say_what_the_module_of_that_name_says(archive: zipfile.ZipFile) -> None:
    if f"sglang/{DIAGNOSTICS}" not in archive.namelist():
        pytest.skip("this release has no such module: the kit's stands in for it")
    told = list(texts_told(ast.parse(archive.read(f"sglang/{DIAGNOSTICS}"))))
    assert len(told) >= 10
    assert missing(told, DIAGNOSTICS) == []


def test_what_runs_them_says_what_later_releases_say(archive: zipfile.ZipFile) -> None:
    source = archive.read("sglang/srt/managers/tokenizer_manager.py")
    told = [text for node in functions(source, ["dump_requests_before_crash"]) for text in texts_told(node)]
    # The kit does not sleep before the diagnostics, so it does not say so.
    of_diagnostics = [text for text in told if "coredump" in text.lower() and not text.startswith("Sleeping")]
    assert missing(of_diagnostics, DIAGNOSTICS) == []


def test_the_wait_for_a_process_tree_has_later_releases_words(archive: zipfile.ZipFile) -> None:
    names = ["kill_process_tree", "_wait_for_reap_or_raise"]
    source = archive.read("sglang/srt/utils/common.py")
    told = [text for node in functions(source, names) for text in texts_told(node)]
    assert missing(told, "srt/utils/common.py") == []


def test_the_variables_of_gpu_cores_have_later_releases_words(archive: zipfile.ZipFile) -> None:
    # The function has moved, by 0.5.19 into a file of its own.
    paths = [name for name in archive.namelist() if re.fullmatch(r"sglang/srt/(server_args|arg_groups/\w+)\.py", name)]
    told = [text for path in paths for text in texts_told(ast.parse(archive.read(path)))]
    assert missing([text for text in told if "crash-dump-folder)" in text], "srt/server_args.py") == []
    # One sentence is the reason in the other here.
    phrases = [text.partition("; ")[0] for text in told if "Failed to create CUDA coredump directory" in text]
    phrases += [text.split(": ")[1].partition("; ")[0] for text in told if "Cannot pre-create CUDA coredump" in text]
    assert missing(phrases, "handler/folders.py") == []
