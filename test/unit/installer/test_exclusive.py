import subprocess
import sys

import pytest

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.installer.exclusive import LOCK_FILE, exclusive

HOLD = """
import sys
from pathlib import Path
from sglang_crashkit.installer.exclusive import exclusive
with exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_process_gets_a_clear_error(tmp_path, holder):
    message = rf"another sglang-crashkit \(pid {holder.pid}\) is changing {tmp_path.parent}"
    with pytest.raises(CrashkitError, match=message), exclusive(tmp_path, wait=0.1):
        pass


def test_a_second_process_waits_for_the_first(tmp_path, holder):
    holder.stdin.close()
    with exclusive(tmp_path, wait=10):
        assert (tmp_path / LOCK_FILE).exists()
    assert not (tmp_path / LOCK_FILE).exists()


def test_the_lock_file_of_a_killed_process_holds_nobody_up(tmp_path, holder):
    holder.kill()
    holder.wait(10)
    assert (tmp_path / LOCK_FILE).exists()
    with exclusive(tmp_path, wait=0.1):
        pass
    assert not (tmp_path / LOCK_FILE).exists()
