from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note when each test's outcome was known."""
    line = {"name": report.nodeid.split("::")[-1], "when": report.when, "outcome": report.outcome, "time": time.time()}
    with Path(os.environ["CRASHKIT_PD_REPORTS"]).open("a") as file:
        file.write(json.dumps(line) + "\n")
