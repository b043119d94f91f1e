"""The patch files themselves: spelling, headers, targets, none unused, none twice, and the lock."""

from __future__ import annotations

import importlib

import pytest

from lanelib.porting import generate_lock, normalise_patches, render_patch
from patches.hook_table import HOOK_FILE, read_hooks
from sglang_crashkit.installer.patches import LOCK_NAME, PatchTree, find_patch_root

#: The one file that the patches add, and not only call from; see `test_hooks`.
HOOKS = f"0.5.9/{HOOK_FILE}.patch"
REFS = {ref.name: ref for ref in PatchTree.load(find_patch_root()).refs()}

each_patch = pytest.mark.parametrize("name", REFS)
each_caller = pytest.mark.parametrize("name", [name for name in REFS if name != HOOKS])


@each_patch
def test_a_patch_is_in_its_one_spelling(name):
    ref = REFS[name]
    assert render_patch(ref.read()) == ref.file.read_bytes()


@each_caller
def test_each_function_that_a_header_names_is_in_the_kit(name):
    calls = REFS[name].read().calls
    # A declaration alone calls none, and stays when the kit is gone.
    assert calls or REFS[name].path == "srt/environ.py"
    for function in calls:
        module, _, attribute = function.rpartition(".")
        assert module.startswith(("sglang_crashkit.srt.", "sglang_crashkit.test.")), function
        assert callable(getattr(importlib.import_module(module), attribute)), function


@each_caller
def test_a_patch_adds_calls_and_no_logic(name):
    added = [text.strip() for hunk in REFS[name].read().hunks for tag, text in hunk.lines if tag == b"+"]
    assert all(added), "a patch adds no blank line"
    words = (b"if ", b"for ", b"while ", b"try:", b"def ", b"class ", b"lambda", b"#")
    assert not [line for line in added if line.startswith(words)]


@each_caller
def test_a_patch_reaches_the_kit_by_one_tolerant_file(name):
    added = b"".join(text for hunk in REFS[name].read().hunks for tag, text in hunk.lines if tag == b"+")
    assert b"sglang_crashkit" not in added
    table = read_hooks(b"".join(REFS[HOOKS].read().hunks[0].new))
    assert [call for call in REFS[name].read().calls if call not in table.values()] == []


def test_no_hook_that_is_handed_out_is_unused():
    table = read_hooks(b"".join(REFS[HOOKS].read().hunks[0].new))
    assert list(table) == sorted(table)
    assert set(table.values()) == {call for ref in REFS.values() for call in ref.read().calls}


def test_no_patch_is_unused(lock, patches):
    used = {file.patch for locked in lock.releases.values() for file in locked.files.values()}
    assert used == set(REFS)


@pytest.mark.wide
@pytest.mark.wheels
def test_the_lock_is_what_the_generator_writes(lock, patches, wheels):
    found = {release: wheels[release] for release in lock.releases}
    assert generate_lock(patches, found).dump() == (find_patch_root() / LOCK_NAME).read_bytes()


@pytest.mark.wheels
def test_line_numbers_are_those_of_the_patchs_own_baseline(patches, wheels):
    own = {release: wheels[release] for release in patches.baselines}
    assert normalise_patches(patches, own) == []
