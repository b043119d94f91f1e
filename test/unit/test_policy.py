"""The table of who is told, ended and looked at."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import sglang_crashkit
from sglang_crashkit.policy import Capture, Decision, Event, Mode, decide, mode_of

ROOT = Path(sglang_crashkit.__file__).parent
DOCUMENT = Path(__file__).parents[2] / "docs" / "policy.md"


def words_of(action: Decision) -> str:
    words = ["tell"] * action.sends_sigquit + ["end"] * action.ends
    if action.captures is not Capture.NONE:
        words.append(action.captures.value)
    return ", ".join(words) or ("record" if action.records else "nothing")


def documented() -> dict[tuple[str, str], str]:
    lines = DOCUMENT.read_text().partition("<!-- table -->")[2].partition("<!-- table end -->")[0].strip().splitlines()
    heads, _rule, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {(mode, row[0]): cell for row in rows for mode, cell in zip(heads[1:], row[1:], strict=True)}


def test_the_table_in_the_documents_is_that_of_the_function() -> None:
    assert documented() == {
        (mode.value, event.value): words_of(decide(mode, event)) for mode in Mode for event in Event
    }


GOES_ON = {Event.HUNG, Event.THREAD_DIED, Event.PEER_LOST, Event.STACKS_WANTED, Event.WORKER_DIED, Event.LEFT}


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("mode", Mode)
def test_only_a_failing_server_program_is_told_ended_or_hurt(mode: Mode, event: Event) -> None:
    action = decide(mode, event)
    if mode is not Mode.SERVER or event in GOES_ON:
        assert (action.sends_sigquit, action.ends) == (False, False)
        assert action.captures is not Capture.FULL or event is Event.DUMPED


@pytest.mark.parametrize(
    ("arguments", "is_program", "expected"),
    [
        ({}, True, Mode.SERVER),
        ({}, False, Mode.LIBRARY),
        ({"elastic_ep_backend": None}, True, Mode.SERVER),
        ({"elastic_ep_backend": "none"}, True, Mode.SERVER),
        ({"elastic_ep_backend": "mooncake"}, True, Mode.ELASTIC),
        ({"elastic_ep_backend": "mooncake"}, False, Mode.ELASTIC),
        ({"enable_fault_tolerance": True}, True, Mode.ELASTIC),
        ({"enable_fault_tolerance": False}, True, Mode.SERVER),
        ({"fault_tolerance_config": "pause"}, True, Mode.ELASTIC),
    ],
)
def test_the_mode_follows_from_who_launches_and_with_which_arguments(
    arguments: dict[str, object], is_program: bool, expected: Mode
) -> None:
    assert mode_of(SimpleNamespace(**arguments), is_program=is_program) is expected


#: Where a signal is sent: by the decision of `policy`; by SGLang's own `kill_process_tree`; to what the kit started.
SENDERS = {
    "kernel/signals.py",
    "kernel/pidfd.py",
    "capture/ladder.py",
    "srt/utils/common.py",
    "kernel/guarded_read.py",
    "kernel/forked.py",
    "capture/tools.py",
    "capture/tracing.py",
    "srt/handler_process.py",
    "capture/gpu_facts.py",
    "replay/server.py",
    "test/plugin.py",
    "cli/main.py",
    "installer/environment.py",
}
SENDING = re.compile(r"os\.kill\(|killpg\(|send_signal\(|signal_pidfd\(|pthread_kill\(|\.kill\(\)|\.terminate\(\)")


def test_no_other_module_sends_a_signal() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if any(SENDING.search(line) for line in re.sub(r'"""[\s\S]*?"""', "", path.read_text()).splitlines())
    }
    assert found == SENDERS
