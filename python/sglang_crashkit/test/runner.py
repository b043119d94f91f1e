"""The test runner of this process that fails a test by name, where there is one: the pytest plugin puts itself here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from sglang_crashkit.test.fail_fast import Source, Watcher


class Runner(Protocol):
    """Fails the running test when a process that it depends on has ended."""

    #: Whether it also stands in for upstream's watcher, which ends the whole run.
    replaces_abort: bool

    def watch(self, source: Source, *, folder: Path | None = None, kill_survivors: bool = True) -> Watcher:
        """Watch processes for the tests that depend on whatever is being set up."""


_runner: Runner | None = None


def set_runner(runner: Runner | None) -> None:
    """Put the runner of this process here, or take it away."""
    global _runner
    _runner = runner


def get_runner() -> Runner | None:
    """Return the runner of this process, None outside a test run with the plugin."""
    return _runner
