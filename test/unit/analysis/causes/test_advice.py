from __future__ import annotations

import re
from pathlib import Path

import pytest

from sglang_crashkit.analysis.causes.advice import ADVICE


@pytest.mark.parametrize("name", ADVICE)
def test_a_step_with_a_command_begins_with_it(name: str) -> None:
    commands = [re.search(r"`[^` ]+ [^`]+`", step) for step in ADVICE[name].steps]
    assert {found.start() for found in commands if found} <= {0}


def test_the_documentation_lists_every_class() -> None:
    text = (Path(__file__).parents[4] / "docs" / "incidents.md").read_text().split("\n## ")
    (part,) = [one for one in text if one.startswith("Causes")]
    rows = [line.split("|")[1] for line in part.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(ADVICE)
