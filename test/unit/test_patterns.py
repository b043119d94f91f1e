"""Every regular expression of the kit takes linear time: what it is matched against may be a client's, and long."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

#: It imports all of the kit with another `re.compile`: in a process of its own.
TIMES = Path(__file__).parent / "support" / "pattern_times.py"


@pytest.mark.wide
@pytest.mark.timeout(900)
def test_every_pattern_takes_linear_time() -> None:
    command = [sys.executable, str(TIMES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["count"] > 50
    assert told["slow"] == []
