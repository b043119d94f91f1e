"""The table of features: probe every release before and after, group what is alike, and keep it in the README."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from featurelib.finding import Finding, Owner
from featurelib.kitsource import KitSource
from featurelib.probes import FEATURES, Feature
from featurelib.sglangsource import SglangTree
from lanelib.porting import ReleaseFiles
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.installer.patches import PatchTree

BEGIN = "<!-- features: written by scripts/feature_table -->"
END = "<!-- features: end -->"
#: What is there before and after, for each feature in order.
Column = tuple[tuple[Finding, Finding], ...]


def probe_release(
    wheel: Path, release: str, patches: PatchTree, kit: KitSource, features: Sequence[Feature] = FEATURES
) -> Column:
    """Return what `release` has of each feature, as its `wheel` has it and once patched."""
    with zipfile.ZipFile(wheel) as archive:
        files = ReleaseFiles(archive, patches.resolve(release))
        entry_points = files.entry_points()
        before = SglangTree(files.pristine, None, entry_points)
        after = SglangTree(files.patched, kit, entry_points)
        return tuple((feature.probe(before), feature.probe(after)) for feature in features)


def render(columns: Mapping[str, Column], features: Sequence[Feature] = FEATURES) -> str:
    """Return the table in Markdown.

    Args:
        columns: release → its column, the oldest release first.
        features: what the rows are.
    """
    groups: dict[Column, list[str]] = {}
    for release, column in columns.items():
        groups.setdefault(column, []).append(release)
    heads = [_label(members, list(columns)) for members in groups.values()]
    rows = [["", *heads], ["---"] * (len(heads) + 1)]
    for number, feature in enumerate(features):
        rows.append([feature.text, *(_cell(*column[number]) for column in groups)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def put_into(document: str, table: str) -> str:
    """Return `document` with `table` between the two marks.

    Raises:
        CrashkitError: the marks are not there once each, in order.
    """
    head, begin, rest = document.partition(BEGIN)
    _old, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in tail or END in head + tail:
        raise CrashkitError(
            "the document has no place for the table",
            next_step=f"put a line '{BEGIN}' and a line '{END}' where it is wanted",
        )
    return f"{head}{BEGIN}\n\n{table}\n{END}{tail}"


def _cell(before: Finding, after: Finding) -> str:
    return _words(after) if before == after else f"{_words(before)} → {_words(after)}"


def _words(finding: Finding) -> str:
    owner = f"**{finding.owner.value}**" if finding.owner is Owner.KIT else finding.owner.value
    return f"{owner}, {finding.note}" if finding.note else owner


def _label(members: Iterable[str], releases: list[str]) -> str:
    """Return ``0.5.9, 0.5.11 to 0.5.13``: each run of neighbours among `releases` by its ends."""
    runs: list[list[str]] = []
    for release in members:
        follows = runs and releases.index(runs[-1][-1]) + 1 == releases.index(release)
        if follows:
            runs[-1].append(release)
        else:
            runs.append([release])
    return ", ".join(", ".join(run) if len(run) < 3 else f"{run[0]} to {run[-1]}" for run in runs)
