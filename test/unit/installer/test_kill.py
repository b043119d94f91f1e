"""A kill at any step of `apply` and `revert` leaves a tree that names itself and can be finished."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_crashkit.installer.apply import apply, revert
from sglang_crashkit.installer.status import State, read_tree
from unit.installer.fake_sglang import install, snapshot
from unit.support.killing import run_and_kill


def placed(environment, site: Path):
    """Return `environment` as it is in a copy of its site folder."""
    return replace(environment, package=site / "sglang", dist_info=site / environment.dist_info.name)


class Scene:
    """The trees that a test compares with, made once."""

    def __init__(self, tmp_path: Path, wheel: Path, kit, other_kit) -> None:
        self.folder = tmp_path / "scene"
        self.environment = install(wheel, self.folder / "sample")
        self.kit, self.other_kit = kit, other_kit
        self.pristine = snapshot(self.environment.site)
        apply(self.environment, kit.patches, kit.lock)
        self.patched = snapshot(self.environment.site)
        shutil.copytree(self.environment.site, self.folder / "patched")
        revert(self.environment, kit.patches, kit.lock)
        shutil.copytree(self.environment.site, self.folder / "pristine")
        apply(self.environment, other_kit.patches, other_kit.lock)
        shutil.copytree(self.environment.site, self.folder / "outdated")
        self.outdated = snapshot(self.environment.site)
        self.count = 0

    def fresh(self, state: str | Path):
        self.count += 1
        site = self.folder / f"try-{self.count}"
        shutil.copytree(self.folder / state, site)
        return placed(self.environment, site)

    def run_and_kill(self, environment, kit, action, step: int) -> bool:
        return run_and_kill(lambda: action(environment, kit.patches, kit.lock), environment.site, step)

    def check_claim(self, environment) -> None:
        """Check that the tree is what its one word says."""
        overall = read_tree(environment, self.kit.lock.find("0.5.9")).overall
        # A name with a leading dot is work in progress: nothing reads it.
        found = {name: data for name, data in snapshot(environment.site).items() if not Path(name).name.startswith(".")}
        if overall is State.PATCHED:
            assert found == self.patched
        elif overall is State.INTERRUPTED:
            assert "sglang-0.5.9.dist-info/sglang-crashkit.json" in found
        else:
            assert found == {State.PRISTINE: self.pristine, State.OUTDATED: self.outdated}[overall]

    def check_finish(self, environment) -> None:
        """Check that both commands finish the tree, each to the exact bytes."""
        for action, expected in ((apply, self.patched), (revert, self.pristine)):
            copy = self.fresh(environment.site)
            action(copy, self.kit.patches, self.kit.lock)
            assert snapshot(copy.site) == expected
            revert(copy, self.kit.patches, self.kit.lock)
            assert snapshot(copy.site) == self.pristine


@pytest.fixture
def scene(tmp_path, wheel, kit, other_kit) -> Scene:
    return Scene(tmp_path, wheel, kit, other_kit)


@pytest.fixture
def shrinking_scene(tmp_path, wheel, kit, other_kit) -> Scene:
    """The kit in hand patches fewer files than the one before it."""
    return Scene(tmp_path, wheel, other_kit, kit)


@pytest.mark.wide
def test_a_kill_between_two_versions_of_the_kit_is_finished(shrinking_scene):
    kill_at_every_step(shrinking_scene, "outdated", apply)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("start", "action"),
    [
        ("pristine", apply),
        ("patched", revert),
        ("outdated", apply),
        ("outdated", revert),
    ],
)
def test_a_kill_at_any_step_can_be_finished(scene, start, action):
    kill_at_every_step(scene, start, action)


def kill_at_every_step(scene: Scene, start: str, action) -> None:
    step = 0
    while True:
        environment = scene.fresh(start)
        if not scene.run_and_kill(environment, scene.kit, action, step):
            break
        scene.check_claim(environment)
        scene.check_finish(environment)
        step += 1
    assert step > 20


@pytest.mark.wide
def test_several_kills_in_a_row_can_be_finished(scene):
    chance = random.Random(20261121)
    for _ in range(40):
        environment = scene.fresh(chance.choice(["pristine", "patched", "outdated"]))
        for _ in range(chance.randint(2, 4)):
            kit = chance.choice([scene.kit, scene.other_kit])
            scene.run_and_kill(environment, kit, chance.choice([apply, revert]), chance.randint(0, 60))
            scene.check_claim(environment)
        scene.check_finish(environment)
