import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.installer.patchfile import (
    FIELDS,
    Hunk,
    HunkLine,
    Patch,
    PatchFormatError,
    parse_patch,
    render_patch,
    split_lines,
)

HEADER = b"Subject: s\nReason: r\nCalls: a.b, c.d\nForwarded: no\nDrop-when: d\n\n"
DIFF = b"--- a/x/y.py\n+++ b/x/y.py\n@@ -3,2 +3,2 @@\n one\n-two\n+2\n"


def test_reads_the_header_and_the_hunks():
    patch = parse_patch(HEADER + DIFF, source="p")
    assert patch.path == "x/y.py"
    assert patch.calls == ("a.b", "c.d")
    assert patch.hunks[0].old_start == 3
    assert patch.hunks[0].old == (b"one\n", b"two\n")
    assert patch.hunks[0].new == (b"one\n", b"2\n")
    assert render_patch(patch) == HEADER + DIFF


def test_a_draft_may_leave_the_numbers_out():
    draft = DIFF.replace(b"@@ -3,2 +3,2 @@", b"@@")
    with pytest.raises(PatchFormatError, match="line 9: expected '@@ -OLD"):
        parse_patch(HEADER + draft, source="p")
    assert parse_patch(HEADER + draft, source="p", draft=True).hunks[0].old == (b"one\n", b"two\n")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "line 1: expected 'Subject: ...'"),
        (HEADER.replace(b"Reason: r", b"Reason:"), "line 2: expected 'Reason: ...'"),
        (HEADER.removesuffix(b"\n") + DIFF, "line 6: expected a blank line"),
        (HEADER, "expected '--- '"),
        (HEADER + b"--- a/x\n+++ b/y\n", "with the same PATH"),
        (HEADER + b"--- a/../x\n+++ b/../x\n@@ -1,1 +1,1 @@\n-a\n+b\n", "does not name a file below"),
        (HEADER + b"--- a//x\n+++ b//x\n@@ -1,1 +1,1 @@\n-a\n+b\n", "does not name a file below"),
        (HEADER + b"--- a/x\n+++ b/x\n", "the diff has no hunk"),
        (HEADER + b"--- a/x\n+++ b/x\n@@ -1,1 +1,1 @@\n a\n", "changes nothing"),
        (HEADER + DIFF + b"junk\n", "begins with ' ', '-' or '+'"),
        (HEADER + DIFF.replace(b"-3,2", b"-3,9"), "line counts do not match"),
        (HEADER + b"--- /dev/null\n+++ b/x\n@@ -1,1 +1,2 @@\n a\n+b\n", "one hunk of added lines"),
    ],
)
def test_a_bad_patch_is_refused_with_its_line(text, why):
    with pytest.raises(PatchFormatError) as caught:
        parse_patch(text, source="some.patch")
    assert why in str(caught.value)
    assert "some.patch, line" in str(caught.value)


@given(st.binary())
def test_splitting_keeps_every_byte_and_splits_at_line_feeds_alone(data):
    lines = split_lines(data)
    assert b"".join(lines) == data
    assert all(line.count(b"\n") == 1 and line.endswith(b"\n") for line in lines[:-1])


line_texts = st.binary(max_size=8).filter(lambda text: b"\n" not in text)


@given(st.lists(st.tuples(st.sampled_from([b" ", b"-", b"+"]), line_texts), min_size=1, max_size=6), st.booleans())
def test_what_is_rendered_reads_back_the_same(raw, ends_without_newline):
    lines = [HunkLine(tag, text + b"\n") for tag, text in raw]
    lines.append(HunkLine(b"+", b"last" if ends_without_newline else b"last\n"))
    patch = Patch("srt/a.py", dict.fromkeys(FIELDS, "text"), creates=False, hunks=(Hunk(7, tuple(lines)),))
    assert parse_patch(render_patch(patch), source="p") == patch
