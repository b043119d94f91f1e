"""A kill or an error at any step of `apply` and `revert` leaves a tree that names itself and can be finished."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.installer.apply import apply, revert
from sglang_crashkit.installer.status import State, read_tree
from unit.installer.fake_sglang import install, snapshot
from unit.support.killing import Step, run_and_kill, run_in_child


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
        dist_info = site / self.environment.dist_info.name
        return replace(self.environment, package=site / "sglang", dist_info=dist_info)

    def check_claim(self, environment) -> State:
        """Check that the tree is what its one word says, and return that."""
        overall = read_tree(environment, self.kit.lock.find("0.5.9")).overall
        # A name with a leading dot is work in progress: nothing reads it.
        found = {name: data for name, data in snapshot(environment.site).items() if not Path(name).name.startswith(".")}
        if overall is State.PATCHED:
            assert found == self.patched
        elif overall is State.INTERRUPTED:
            assert "sglang-0.5.9.dist-info/sglang-crashkit.json" in found
        else:
            assert found == {State.PRISTINE: self.pristine, State.OUTDATED: self.outdated}[overall]
        return overall

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


@pytest.mark.wide
@pytest.mark.parametrize(
    ("start", "action", "shrinks"),
    [
        ("pristine", apply, False),
        ("patched", revert, False),
        ("outdated", apply, False),
        ("outdated", revert, False),
        ("outdated", apply, True),  # to a kit that patches fewer files
    ],
)
def test_a_kill_at_any_step_can_be_finished(tmp_path, wheel, kit, other_kit, start, action, shrinks):
    scene = Scene(tmp_path, wheel, *((other_kit, kit) if shrinks else (kit, other_kit)))
    for step in itertools.count():
        environment = scene.fresh(start)
        if not run_and_kill(partial(action, environment, scene.kit.patches, scene.kit.lock), environment.site, step):
            break
        scene.check_claim(environment)
        scene.check_finish(environment)
    assert step > 20


@pytest.mark.wide
@pytest.mark.parametrize(("start", "action"), [(State.PRISTINE, apply), (State.PATCHED, revert)])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_after_an_error_at_any_step_another_run_finishes(scene, tmp_path, start, action, code):
    told, reached = tmp_path / "told", tmp_path / "reached"
    for number in itertools.count():
        environment = scene.fresh(start.value)

        def fail(step: Step, number=number) -> None:
            if step.number == number:
                reached.touch()
                raise OSError(code, os.strerror(code), "/some/file")

        def act(environment=environment) -> None:
            told.write_text("")
            try:
                action(environment, scene.kit.patches, scene.kit.lock)
            except CrashkitError as error:
                told.write_text(error.message)

        assert run_in_child(act, environment.site, fail) == 0
        if not reached.exists():
            break
        reached.unlink()
        message, overall = told.read_text(), scene.check_claim(environment)
        assert message or overall not in (start, State.INTERRUPTED)
        assert overall is start or "nothing was changed" not in message
        scene.check_finish(environment)
    assert number > 20


@pytest.mark.wide
def test_several_kills_in_a_row_can_be_finished(scene):
    chance = random.Random(20261121)
    for _ in range(40):
        environment = scene.fresh(chance.choice(["pristine", "patched", "outdated"]))
        for _ in range(chance.randint(2, 4)):
            kit, action = chance.choice([scene.kit, scene.other_kit]), chance.choice([apply, revert])
            act = partial(action, environment, kit.patches, kit.lock)
            run_and_kill(act, environment.site, chance.randint(0, 60))
            scene.check_claim(environment)
        scene.check_finish(environment)
