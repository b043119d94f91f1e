"""Short excerpts of logs and of what tools print: each has one kind of failure, or a sign of none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_crashkit.judge.verdict import judge
from sglang_crashkit.model.case import case_of
from sglang_crashkit.sources.text.reader import read

EXCERPTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("excerpts.yaml").read_text())


@pytest.mark.parametrize("name", EXCERPTS)
def test_an_excerpt_is_told(name: str, tmp_path: Path) -> None:
    expected = EXCERPTS[name]
    paths = [tmp_path / f"{number}.log" for number in range(len(expected["files"]))]
    for path, text in zip(paths, expected["files"], strict=True):
        path.write_text(text)
    verdict = judge(case_of(read(paths)))
    assert (verdict.kind, verdict.first) == (expected["class"], expected["first"])
    assert verdict.component == expected.get("part", verdict.component)
    assert verdict.level == expected.get("level", verdict.level)
    assert expected.get("headline", "") in verdict.headline
    assert expected.get("says", "") in "\n".join(verdict.next)
    assert expected.get("not_said", "\0") not in "\n".join(verdict.next)
