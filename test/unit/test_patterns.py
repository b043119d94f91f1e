"""Every regular expression of the kit takes linear time: what it is matched against may be a client's, and long."""

from __future__ import annotations

import json
import subprocess
import sys

from unit.support import pattern_times


def test_every_pattern_takes_linear_time() -> None:
    command = [sys.executable, pattern_times.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["count"] > 50
    assert told["slow"] == []
