from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.installer.hunks import HunkConflictError, apply_patch, relocate_patch, unapply_patch
from sglang_crashkit.installer.patchfile import FIELDS, Hunk, HunkLine, Patch


def hunk(*lines: bytes) -> Hunk:
    return Hunk(1, tuple(HunkLine(line[:1], line[1:] + b"\n") for line in lines))


def patch_of(*hunks: Hunk, creates: bool = False) -> Patch:
    return Patch("srt/a.py", dict.fromkeys(FIELDS, "text"), creates, hunks)


def test_a_hunk_applies_at_an_offset():
    patch = patch_of(hunk(b" b", b"+new"))
    assert apply_patch(b"x\ny\na\nb\nc\n", patch) == b"x\ny\na\nb\nnew\nc\n"


@pytest.mark.parametrize(
    ("text", "places", "why"),
    [
        (b"a\nb \n", 0, "nowhere"),  # a trailing blank is a difference
        (b"a\n\tb\n", 0, "nowhere"),
        (b"b\nb\n", 2, "at 2 places"),
        (b"b", 0, "nowhere"),  # without its newline it is another line
    ],
)
def test_context_matches_exactly_at_exactly_one_place(text, places, why):
    with pytest.raises(HunkConflictError, match=f"srt/a.py.*hunk 1.*{why}") as caught:
        apply_patch(text, patch_of(hunk(b" b", b"+new")))
    assert caught.value.problems[0].places == places


def test_hunks_come_in_the_order_of_the_file_and_do_not_overlap():
    swapped = patch_of(hunk(b" c", b"+3"), hunk(b" a", b"+1"))
    with pytest.raises(HunkConflictError, match="hunk 2: it stands at line 1, before the end"):
        apply_patch(b"a\nb\nc\n", swapped)
    overlapping = patch_of(hunk(b" a", b"-b"), hunk(b" b", b" c", b"+3"))
    with pytest.raises(HunkConflictError, match="hunk 2: it stands at line 2"):
        apply_patch(b"a\nb\nc\n", overlapping)


def test_every_hunk_that_fails_is_named():
    with pytest.raises(HunkConflictError) as caught:
        apply_patch(b"a\na\n", patch_of(hunk(b" a", b"+1"), hunk(b" z", b"+2")))
    assert [(problem.number, problem.places) for problem in caught.value.problems] == [(1, 2), (2, 0)]


def test_a_hunk_without_old_lines_fits_nowhere():
    with pytest.raises(HunkConflictError):
        apply_patch(b"a\n", patch_of(hunk(b"+1")))


def test_a_new_file_is_made_and_taken_back():
    patch = patch_of(hunk(b"+1"), creates=True)
    assert apply_patch(None, patch) == b"1\n"
    assert unapply_patch(b"1\n", patch) is None
    with pytest.raises(HunkConflictError, match="already there"):
        apply_patch(b"", patch)
    with pytest.raises(HunkConflictError, match="differs"):
        unapply_patch(b"1\n2\n", patch)


def test_a_patch_of_a_missing_file_says_so():
    with pytest.raises(HunkConflictError, match="there is no such file"):
        apply_patch(None, patch_of(hunk(b" a", b"+1")))


def test_line_numbers_are_those_of_the_file():
    patch = patch_of(hunk(b" b", b"+1"), hunk(b" d", b"+2"))
    assert [found.old_start for found in relocate_patch(b"a\nb\nc\nd\n", patch).hunks] == [2, 4]


@given(st.lists(st.integers(0, 30), min_size=1, unique=True), st.data())
def test_taking_a_patch_back_gives_the_same_bytes(numbers, data):
    lines = [b"line %d" % number for number in numbers]
    chosen = sorted(data.draw(st.sets(st.integers(0, len(lines) - 1), min_size=1)))
    kinds = [data.draw(st.sampled_from(["add", "change"])) for _ in chosen]
    hunks = [
        hunk(b" " + lines[at], b"+added %d" % at) if kind == "add" else hunk(b"-" + lines[at], b"+changed %d" % at)
        for at, kind in zip(chosen, kinds, strict=True)
    ]
    pristine = b"\n".join(lines) + b"\n"
    patch = patch_of(*hunks)
    patched = apply_patch(pristine, patch)
    assert patched != pristine
    assert unapply_patch(patched, replace(patch)) == pristine
