"""Every supported release, from upstream's own wheels: resolve, apply, compile, revert, compare."""

from __future__ import annotations

import ast
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from lanelib.porting import read_package_file
from patches.hook_table import HOOK_FILE, read_hooks
from sglang_crashkit import __version__
from sglang_crashkit.installer.apply import apply, revert
from sglang_crashkit.installer.environment import Environment, Kit
from sglang_crashkit.installer.patches import apply_patch
from sglang_crashkit.installer.status import FileState, Overall, read_tree

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
    kit = Kit(__version__, Path("/nowhere"), {}, only_by_python_path=False)
    return Environment(Path(sys.executable), release, tmp_path / "sglang", dist_info, kit)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_supported_releases_are_those_that_are_promised(lock):
    assert list(lock.releases) == EXPECTED


def test_patches_apply_compile_and_revert_to_the_same_bytes(environment, patches, lock, release):
    pristine = contents(environment.site)
    outcome = apply(environment, patches, lock)
    assert set(outcome.changed) == set(lock.releases[release].files)
    tree = read_tree(environment, lock.releases[release])
    assert tree.overall is Overall.PATCHED
    assert set(tree.files.values()) == {FileState.PATCHED}
    for path in outcome.changed:
        file = environment.package / path
        compile(file.read_bytes(), file, "exec", dont_inherit=True)
    revert(environment, patches, lock)
    assert contents(environment.site) == pristine


def test_each_function_that_a_patch_calls_is_called_exactly_once(wheels, patches, release):
    refs = patches.resolve(release)
    table = read_hooks(apply_patch(None, refs[HOOK_FILE].read()))
    with zipfile.ZipFile(wheels[release]) as archive:
        published = {path: read_package_file(archive, path) for path in refs}
    for path, ref in refs.items():
        patched = apply_patch(published[path], ref.read())
        nodes = list(ast.walk(ast.parse(patched)))
        imported = {
            alias.asname or alias.name: table[alias.name]
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module == "sglang.srt.crashkit"
            for alias in node.names
        }
        uses = Counter(node.id for node in nodes if isinstance(node, ast.Name))
        calls = ref.read().calls
        assert sorted(imported.values()) == sorted(calls), f"{path} imports other functions than its header names"
        assert {name: uses[name] for name in imported} == dict.fromkeys(imported, 1), path
