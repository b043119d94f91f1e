from __future__ import annotations

import pytest

from featurelib.finding import ABSENT, kit, upstream
from featurelib.probes import Feature
from featurelib.table import BEGIN, END, put_into, render
from sglang_crashkit.errors import CrashkitError

FEATURES = [Feature("first", lambda tree: ABSENT), Feature("second", lambda tree: ABSENT)]
OLD = ((ABSENT, kit()), (upstream(), upstream()))
NEW = ((upstream("slow"), kit("fast")), (ABSENT, ABSENT))


def table(columns):
    return render(columns, FEATURES)


def test_before_and_after_are_both_visible_where_they_differ():
    assert table({"1": OLD, "2": NEW}) == (
        "|  | 1 | 2 |\n"
        "| --- | --- | --- |\n"
        "| first | no → **kit** | upstream, slow → **kit**, fast |\n"
        "| second | upstream | no |\n"
    )


@pytest.mark.parametrize(
    ("columns", "heads"),
    [
        ({"1": OLD, "2": OLD}, "|  | 1, 2 |"),
        ({"1": OLD, "2": OLD, "3": OLD, "4": NEW}, "|  | 1 to 3 | 4 |"),
        ({"1": OLD, "2": NEW, "3": OLD}, "|  | 1, 3 | 2 |"),
        ({"1": OLD, "2": OLD, "3": OLD, "4": NEW, "5": OLD}, "|  | 1 to 3, 5 | 4 |"),
    ],
)
def test_releases_with_the_same_column_share_it(columns, heads):
    assert table(columns).splitlines()[0] == heads


def test_a_note_alone_makes_another_column():
    other = ((ABSENT, kit("otherwise")), OLD[1])
    assert table({"1": OLD, "2": other}).splitlines()[0] == "|  | 1 | 2 |"


def test_only_what_stands_between_the_marks_is_replaced():
    document = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert put_into(document, "new\n") == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert put_into(put_into(document, "new\n"), "new\n") == put_into(document, "new\n")


@pytest.mark.parametrize("document", ["", BEGIN, END, f"{END} {BEGIN}", f"{BEGIN} {END} {BEGIN} {END}"])
def test_a_document_without_one_place_for_it_is_refused(document):
    with pytest.raises(CrashkitError, match="no place"):
        put_into(document, "new\n")
