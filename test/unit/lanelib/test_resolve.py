from __future__ import annotations

import itertools
import json
import re

import pytest

from lanelib import resolve
from lanelib.errors import LaneError
from lanelib.paths import RECIPES

LOCKS = sorted(RECIPES.glob("*.lock"))
PIN = re.compile(r"[a-z0-9][a-z0-9._-]*==[\w.+!]+( ; [\w.' <>=!]+)?")

#: Stands in for uv: notes its arguments, and answers as the registry would.
FAKE_UV = """
import json, sys
with open({notes!r}, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
if "--no-deps" in sys.argv:
    print({facts!r})
else:
    print("sglang==9.9.9")
"""


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_a_lock_holds_exact_versions_and_no_addresses(path):
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]

    assert [line for line in lines if not PIN.fullmatch(line)] == []


@pytest.mark.parametrize("release", ["0.5.9", "0.5.12.post1", "0.5.23"])
def test_a_lane_lock_names_its_release_and_the_extras(release):
    lines = resolve.lock_path(release).read_text().splitlines()

    assert f"sglang=={release}" in lines
    assert {line.split("==")[0] for line in lines} >= {*resolve.EXTRAS, "psutil", "py-spy", "setproctitle"}


@pytest.mark.parametrize("text", ["", "latest", "0.5", "../0.5.9", "0.5.9 ", "v0.5.9"])
def test_check_release_refuses_what_is_no_release(text):
    with pytest.raises(LaneError, match="is not an SGLang release") as caught:
        resolve.check_release(text)

    assert caught.value.exit_code == 2


@pytest.fixture
def registry(tmp_path, monkeypatch, programs):
    """A uv that answers with given facts; returns a function that gives its calls."""
    notes = tmp_path / "calls"
    monkeypatch.setattr(resolve, "LANES", tmp_path)
    monkeypatch.setattr(resolve, "RECIPES", tmp_path / "recipes")

    def answer(facts):
        source = FAKE_UV.format(notes=str(notes), facts=facts)
        monkeypatch.setattr(resolve, "tool", lambda name: programs.add(name, source))
        return lambda: [json.loads(line) for line in notes.read_text().splitlines()]

    return answer


def test_an_unknown_release_is_named(registry, monkeypatch, programs):
    monkeypatch.setattr(resolve, "tool", lambda name: programs.add(name, "import sys; sys.exit('no version')"))

    with pytest.raises(LaneError, match=r"SGLang 9\.9\.9 cannot be found") as caught:
        resolve.versions_of("9.9.9")

    assert "no version" in caught.value.message


@pytest.mark.parametrize(
    ("facts", "newest"),
    [
        ('[[packages]]\nname = "sglang"\nwheels = [{ upload-time = 2026-07-25T00:12:07Z }]', ["2026-07-26T00:12:07Z"]),
        ('[[packages]]\nname = "sglang"\nversion = "9.9.9"', []),
    ],
)
def test_resolve_goes_back_to_the_day_after_the_release_where_that_is_known(registry, facts, newest):
    calls = registry(facts)
    limits = {option: resolve.RECIPES / f"9.9.9.{option}s" for option in ("constraint", "override")}
    resolve.RECIPES.mkdir()
    for path in limits.values():
        path.write_text("kernels==0.13.0\n")
    assert resolve.resolve("9.9.9").endswith("sglang==9.9.9\n")
    options = calls()[-1]
    assert [after for option, after in itertools.pairwise(options) if option == "--exclude-newer"] == newest
    assert {option: options[options.index(f"--{option}") + 1] for option in limits} == {
        option: str(path) for option, path in limits.items()
    }


def test_write_lock_keeps_what_the_lane_was_made_from_and_replaces_no_lock(registry):
    registry('name = "sglang"')
    resolved = resolve.versions_of("9.9.9")
    path = resolve.write_lock("9.9.9")
    assert path.read_text() == resolved.read_text()
    assert (resolve.versions_of("9.9.9"), resolve.locked_releases()) == (path, ["9.9.9"])
    with pytest.raises(LaneError, match=r"9\.9\.9 is locked already"):
        resolve.write_lock("9.9.9")
