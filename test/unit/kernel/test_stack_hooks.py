from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path

import pytest

from sglang_crashkit.kernel.stack_hooks import (
    DEFAULT_SIGNAL,
    HookFiles,
    StackHooks,
    describe,
    read_stack_hooks,
)

ARMED = StackHooks(pid=10, start_ticks=20, main_thread=30, signal=DEFAULT_SIGNAL, roots=("/a", "/b\udcff"))


@pytest.mark.parametrize("signum", [DEFAULT_SIGNAL, 0])
def test_what_was_written_is_read_for_the_same_process_only(tmp_path: Path, signum: int) -> None:
    hooks = dataclasses.replace(ARMED, signal=signum)
    describe(tmp_path, hooks)
    assert read_stack_hooks(tmp_path, 10, 20) == hooks
    assert read_stack_hooks(tmp_path, 10, 21) is None
    assert HookFiles.of(tmp_path, 10, 20).description.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "change",
    [*({"signal": number} for number in (9, signal.SIGTERM, 65, -1, "x")), {"main_thread": None}, {"roots": 5}],
    ids=str,
)
def test_rubbish_is_as_good_as_nothing(tmp_path: Path, change: dict[str, object]) -> None:
    describe(tmp_path, ARMED)
    file = HookFiles.of(tmp_path, 10, 20).description
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert read_stack_hooks(tmp_path, 10, 20) is None


def test_the_default_signal_is_none_of_systemds() -> None:
    # Those of systemd's manager, which the process 1 of a container may be: it would halt on them.
    assert DEFAULT_SIGNAL - signal.SIGRTMIN not in {*range(7), *range(13, 31)}
