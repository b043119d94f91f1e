from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lanelib.porting import read_package_file
from sglang_crashkit.installer.patches import Lock, PatchTree, apply_patch, find_patch_root, load_lock
from sglang_crashkit.installer.wheel import find_wheel

LOCK = load_lock()
#: The first, the last, and one from where most of the patches change; the rest is left out by ``scripts/test --fast``.
NARROW = ("0.5.9", "0.5.12.post1", "0.5.23")


@pytest.fixture(scope="session")
def patches() -> PatchTree:
    return PatchTree.load(find_patch_root())


@pytest.fixture(scope="session")
def lock() -> Lock:
    return LOCK


class Wheels(dict[str, Path]):
    """Release → its wheel, checked by sha256 once and downloaded where the cache has none."""

    def __missing__(self, release: str) -> Path:
        self[release] = find_wheel(release, LOCK.releases[release].wheels, download=True)
        return self[release]


@pytest.fixture(scope="session")
def wheels() -> Wheels:
    return Wheels()


@pytest.fixture(scope="module")
def read_patched(wheels: Wheels, patches: PatchTree, release: str) -> Iterator[Callable[[str], bytes | None]]:
    """Read a file of the release below its package as it is once patched; None for a file that the release lacks."""
    refs = patches.resolve(release)
    with zipfile.ZipFile(wheels[release]) as archive:

        def read(path: str) -> bytes | None:
            pristine = read_package_file(archive, path)
            return apply_patch(pristine, refs[path].read()) if path in refs else pristine

        yield read


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "release" in metafunc.fixturenames:
        releases = [pytest.param(one, marks=() if one in NARROW else pytest.mark.wide) for one in LOCK.releases]
        # One release after the other, so that what was read of it serves all tests of a file.
        metafunc.parametrize("release", releases, scope="module")
