from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_crashkit.capture.cuda_core import child
from sglang_crashkit.capture.cuda_core.child import CoreReader, Reading
from unit.synthetic_core import SPIN_NAME, CoreSpec, DeviceSpec, SmSpec, core_bytes, hung_core
from unit.targets import make_tool
from unit.waiting import LONG, wait_until

Write = Callable[[bytes], Path]


def read(path: Path, seconds: float = LONG) -> Reading:
    return wait_until(CoreReader(path, seconds).look, "the core is read")


def test_a_core_is_read_by_a_process_of_its_own(write: Write) -> None:
    reading = read(write(hung_core()))
    assert reading.reason == ""
    assert reading.core is not None
    assert reading.core["kernels"][0]["entry"]["function"] == SPIN_NAME
    assert "warps" not in reading.core
    assert reading.brief == [f"kernel {SPIN_NAME} on GPU 0: grid 2x1x1, block 32x1x1, active, its name inferred"]


def test_what_cannot_be_read_is_told_of(tmp_path: Path) -> None:
    reading = read(tmp_path / "none")
    assert (reading.core, reading.brief) == (None, [])
    assert "cannot be opened: No such file or directory" in reading.reason


def test_an_incident_keeps_no_more_than_it_needs(write: Write) -> None:
    sms = [SmSpec(number, exception=14) for number in range(300)]
    reading = read(write(core_bytes(CoreSpec([DeviceSpec(sms=sms)]))))
    assert reading.core is not None
    assert len(reading.core["faults"]) == 256
    assert reading.core["notes"][-1] == "44 kernels and exceptions are left out here"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exec sleep 600", "its reader: py-spy did not end within 0.5 s"),
        ("exit 3", "its reader: py-spy ended with status 3"),
        ("kill -SEGV $$", "its reader: py-spy ended with status -11"),
        ("echo '[1, 2'", "its reader wrote no answer"),
        ("echo '{}'", "its reader wrote no answer"),
        ("echo '[]'", "its reader wrote no answer"),
        ("exec cat /dev/zero", "its reader: py-spy printed more than 0 MiB"),
    ],
)
def test_whatever_becomes_of_the_reader_there_is_an_answer(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    monkeypatch.setattr(sys, "executable", make_tool(tmp_path, script))
    monkeypatch.setattr(child, "MAX_OUTPUT", 1000)
    seconds = 0.5 if "sleep" in script else LONG
    assert read(write(hung_core()), seconds) == Reading(None, [], reason)


#: The program as it is, but for a core that takes all the memory there is.
GREEDY = (
    "import sys; from sglang_crashkit.capture.cuda_core import child; "
    "child.read_cuda_core = lambda path, most_seconds: bytearray(2 << 30); "
    "sys.exit(child.main(sys.argv[1:]))"
)


def test_the_reader_has_little_memory(write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = make_tool(tmp_path, f'shift 2; exec "{sys.executable}" -c "{GREEDY}" "$@"')
    monkeypatch.setattr(sys, "executable", tool)
    assert "it takes more memory to read than 1024 MiB" in read(write(hung_core())).reason
