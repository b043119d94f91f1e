"""The tests that need a GPU can be loaded without one, so that nothing breaks unseen there."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "gpu"


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_a_module_of_the_gpu_tests_is_loaded(name: str) -> None:
    assert importlib.import_module(f"gpu.{name}").__doc__


def test_what_a_process_on_a_gpu_runs_is_python() -> None:
    compile(importlib.import_module("gpu.kernels").SITE_CODE, "sitecustomize.py", "exec")
