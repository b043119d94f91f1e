"""The README's table of features is what the generator finds in upstream's wheels, the patches and the kit."""

from __future__ import annotations

import pytest

from featurelib.finding import Owner
from featurelib.kitsource import KitSource
from featurelib.probes import FEATURES
from featurelib.table import Column, probe_release, put_into, render
from lanelib.paths import PYPROJECT, ROOT

pytestmark = [pytest.mark.wheels, pytest.mark.wide]


@pytest.fixture(scope="module")
def columns(wheels, patches) -> dict[str, Column]:
    kit = KitSource(ROOT / "python" / "sglang_crashkit", PYPROJECT.read_text())
    return {release: probe_release(wheel, release, patches, kit) for release, wheel in wheels.items()}


def test_the_readme_has_the_table_that_the_generator_writes(columns):
    readme = (ROOT / "README.md").read_text()
    assert readme == put_into(readme, render(columns)), "next: scripts/feature_table --write"


def test_patching_takes_no_feature_away(columns):
    lost = [
        (release, feature.text)
        for release, column in columns.items()
        for feature, (before, after) in zip(FEATURES, column, strict=True)
        if before.owner is not Owner.NOBODY and after.owner is Owner.NOBODY
    ]
    assert lost == []


@pytest.mark.parametrize("number", range(len(FEATURES)), ids=lambda number: FEATURES[number].probe.__name__)
def test_every_release_has_a_feature_once_patched_or_none_has(columns, number):
    assert len({column[number][1].owner is Owner.NOBODY for column in columns.values()}) == 1
