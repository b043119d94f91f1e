"""Every supported release, from upstream's own wheels: resolve, apply, compile, revert, compare."""

from __future__ import annotations

import ast
import functools
import os
import shutil
import sys
import types
import zipfile
from pathlib import Path
from unittest import mock

import pytest

from lanelib.porting import generate_lock
from patches.hook_table import HOOK_FILE, read_hooks
from sglang_crashkit import __version__
from sglang_crashkit.installer.apply import apply, revert
from sglang_crashkit.installer.environment import Environment, Kit
from sglang_crashkit.installer.patches import PatchTree
from sglang_crashkit.installer.status import State, read_tree
from unit.installer.fake_sglang import snapshot
from unit.support.killing import Step, run_in_child

pytestmark = pytest.mark.wheels

EXPECTED = [
    *("0.5.9", "0.5.10", "0.5.10.post1", "0.5.11", "0.5.12", "0.5.12.post1", "0.5.13", "0.5.13.post1", "0.5.14"),
    *("0.5.15", "0.5.15.post1", "0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"),
]


@pytest.fixture
def environment(tmp_path, wheels, lock, release) -> Environment:
    """The files that patches touch, and the metadata, of one release."""
    paths = {f"sglang/{path}" for path in lock.releases[release].files}
    with zipfile.ZipFile(wheels[release]) as archive:
        wanted = [name for name in archive.namelist() if name in paths or ".dist-info/" in name]
        archive.extractall(tmp_path, wanted)
    dist_info = tmp_path / f"sglang-{release}.dist-info"
    kit = Kit(__version__, Path("/nowhere"), {})
    return Environment(Path(sys.executable), release, tmp_path / "sglang", dist_info, kit)


def test_the_supported_releases_are_those_that_are_promised(lock):
    assert list(lock.releases) == EXPECTED


def test_patches_apply_compile_and_revert_to_the_same_bytes(environment, patches, lock, release):
    pristine = snapshot(environment.site)
    outcome = apply(environment, patches, lock)
    assert set(outcome.changed) == set(lock.releases[release].files)
    tree = read_tree(environment, lock.releases[release])
    assert tree.overall is State.PATCHED
    assert set(tree.files.values()) == {State.PATCHED}
    for path in outcome.changed:
        file = environment.package / path
        compile(file.read_bytes(), file, "exec", dont_inherit=True)
    revert(environment, patches, lock)
    assert snapshot(environment.site) == pristine


def names_that_do_not_import(package: Path, paths: list[str]) -> list[str]:
    """Import what the files at `paths` import of each other, as Python would, and return what it would not find."""
    there = {path: (package / path).read_bytes() for path in paths if (package / path).exists()}
    failed = []
    for path, data in there.items():
        for module, name in imported_names(data):
            file = f"{module.replace('.', '/')}.py"
            if file in paths and (file not in there or name not in names_of(file, there[file])):
                failed.append(f"{path}:{module}.{name}")
    return failed


@functools.cache
def imported_names(source: bytes) -> list[tuple[str, str]]:
    """Return the module below the package, and the name, of what a file imports."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.module]
    return [(node.module.removeprefix("sglang."), alias.name) for node in nodes for alias in node.names]


@functools.cache
def names_of(path: str, source: bytes) -> set[str]:
    """Return what can be imported of a file; the kit's own one is run, and has hooks beside its own names."""
    if path == HOOK_FILE:
        module = types.ModuleType("sglang.srt.crashkit")
        # Without SGLang here it switches the kit off for all children of this process.
        with mock.patch.dict(os.environ):
            exec(compile(source, path, "exec"), vars(module))
            return {name for name in read_hooks(source) if callable(getattr(module, name))}
    nodes = list(ast.walk(ast.parse(source)))
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    names |= {alias.asname or alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    return names | {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


@pytest.mark.wide
@pytest.mark.parametrize("change", ["apply", "revert", "replace", "go back"])
def test_sglang_imports_wherever_a_change_is_cut_off(environment, patches, lock, release, wheels, tmp_path, change):
    # Of a kit that had other names in its file, and other calls of them.
    shutil.copytree(patches.root, tmp_path / "older")
    for file in (tmp_path / "older").rglob("*.patch"):
        file.write_text(file.read_text().replace("on_batch", "on_older_batch"))
    older = PatchTree.load(tmp_path / "older")
    older_lock = generate_lock(older, {release: wheels[release]})
    start, action, to = {
        "apply": (None, apply, (patches, lock)),
        "revert": ((patches, lock), revert, (patches, lock)),
        "replace": ((older, older_lock), apply, (patches, lock)),
        "go back": ((older, older_lock), revert, (patches, lock)),
    }[change]
    if start is not None:
        apply(environment, *start)
    paths = list(lock.releases[release].files)
    assert names_that_do_not_import(environment.package, paths) == []
    failed = tmp_path / "failed"
    points = 0

    def look(step: Step) -> None:
        nonlocal points
        if step.event in ("os.rename", "os.remove"):
            points += 1
            with failed.open("a") as file:
                print(points, *names_that_do_not_import(environment.package, paths)[:1], file=file)

    assert os.waitstatus_to_exitcode(run_in_child(lambda: action(environment, *to), environment.site, look)) == 0
    assert names_that_do_not_import(environment.package, paths) == []
    told = [line.split() for line in failed.read_text().splitlines()]
    assert len(told) > 10
    assert [line for line in told if len(line) > 1] == []
