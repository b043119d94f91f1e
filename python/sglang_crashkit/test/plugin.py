"""The pytest plugin: when a watched process ends, the running test that depends on it fails at once, by name.

::

    @pytest.fixture(scope="class")
    def pair(crashkit_watch):
        with start_pair() as pair, crashkit_watch(lambda: [("prefill", pair.prefill), ("decode", pair.decode)]):
            yield pair

In unittest's ``setUpClass`` call `sglang_crashkit.test.fail_fast.watch`, and end the watch before the processes. The
plugin interrupts the running test, or its setup, if it depends on the fixture: a signal raises an exception in the main
thread, even while that waits for a response. Later tests that depend on the same fixture fail before they start. All
else continues: other tests, teardown, reports, coverage.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from types import FrameType

    from sglang_crashkit.test.fail_fast import Source, Watcher


class ProcessDiedError(Exception):
    """A process on which the test depends has ended."""


class ProcessDiedDuringTestError(BaseException):
    """A process on which the running test depends has ended.

    Not an `Exception`: a test that catches `Exception` and retries would continue with a dead server.
    """


@dataclass(eq=False)
class Guard:
    """A watch, and the fixture or the test that started it."""

    watcher: Watcher
    owner: str  # the name of the fixture, or the node id of the test
    is_fixture: bool
    param: object = None  # the fixture's parameter
    reported: bool = False  # an exception with the death was created; it is in a report, or will be
    is_over: bool = False  # the fixture is torn down; a later fixture of that name has other processes

    def names(self, item: pytest.Item) -> bool:
        """Say whether a test depends on the owner if that is a fixture, or is the owner."""
        if not self.is_fixture:
            return self.owner == item.nodeid
        params = getattr(getattr(item, "callspec", None), "params", {})
        return self.owner in getattr(item, "fixturenames", ()) and params.get(self.owner, self.param) is self.param

    def concerns(self, item: pytest.Item) -> bool:
        """Say whether a watched process has ended, and a test depends on the watched processes."""
        return self.watcher.death is not None and not self.is_over and self.names(item)

    def report(self, kind: type[BaseException] = ProcessDiedError) -> BaseException:
        """Return an exception that describes the death."""
        assert self.watcher.death is not None
        self.reported = True
        return kind("\n".join(self.watcher.death.lines()))


class FailByName:
    """The watches of this pytest process, and the pytest hooks that report deaths."""

    def __init__(self, config: pytest.Config) -> None:
        folder = config.getoption("crashkit_evidence")
        self._folder = Path(folder).absolute() if folder else None
        self._guards: list[Guard] = []
        self._phase: tuple[pytest.Item, str] | None = None
        self._fixtures: list[tuple[str, object]] = []
        self._handler: tuple[int, Any] | None = None

    def watch(self, source: Source, *, folder: Path | None = None) -> Watcher:
        """Watch processes for the tests that depend on the fixture in setup, or for the running test."""
        from sglang_crashkit.test.fail_fast import Watcher

        watcher = Watcher(source, lambda _death: self._interrupt(), folder=folder or self._folder)
        test = self._phase[0].nodeid if self._phase else ""
        owner, param = self._fixtures[-1] if self._fixtures else (test, None)
        self._guards.append(Guard(watcher, owner, is_fixture=bool(self._fixtures), param=param))
        if self._handler is None and threading.current_thread() is threading.main_thread():
            # A real-time signal, because other signals are in use: SIGALRM by pytest-timeout, SIGUSR1 by faulthandler.
            for signum in range(signal.SIGRTMAX, signal.SIGRTMIN, -1):
                if signal.getsignal(signum) == signal.SIG_DFL:
                    self._handler = (signum, signal.signal(signum, self._on_signal))
                    break
        return watcher.start()

    # -- hooks

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        """Record the fixture in setup, which owns the watches that it starts."""
        self._fixtures.append((fixturedef.argname, getattr(request, "param", None)))
        try:
            return (yield)
        finally:
            self._fixtures.pop()

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        """Record that no later test depends on the processes of the fixture."""
        for guard in self._guards:
            guard.is_over |= guard.is_fixture and guard.owner == fixturedef.argname

    # The innermost wrapper, so that only code of the test and its fixtures is interrupted, not that of other plugins.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """Allow the signal to interrupt the setup."""
        self._phase = (item, "setup")
        try:
            return (yield)
        finally:
            self._phase = None

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Allow the signal to interrupt the test."""
        self._phase = (item, "call")
        try:
            self.raise_for(item)
            return (yield)
        finally:
            self._phase = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        """Report a death that no test has reported; the teardown itself is not interrupted."""
        result = yield
        for guard in self._guards:
            if guard.watcher.death is not None and not guard.reported and guard.names(item):
                raise guard.report()
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Report the dead process as the cause if the test failed from a consequence of the death first."""
        report = yield
        cause = call.excinfo.value if call.excinfo is not None else None
        is_told = isinstance(cause, (ProcessDiedError, ProcessDiedDuringTestError))
        if not report.failed or report.when == "teardown" or is_told:
            return report
        for guard in self._guards:
            guard.watcher.settle()
            if guard.concerns(item):
                try:
                    raise guard.report() from cause
                except ProcessDiedError:
                    report.longrepr = item.repr_failure(pytest.ExceptionInfo.from_current())
                break
        return report

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print which processes died, and where the evidence is."""
        deaths = [guard.watcher.death for guard in self._guards if guard.watcher.death is not None]
        if not deaths:
            return
        # Imported here only, because most runs have no death.
        from sglang_crashkit.visible import visible

        terminalreporter.section("processes that ended unexpectedly")
        for death in deaths:
            for line in death.lines():
                terminalreporter.write_line(visible(line))

    def pytest_unconfigure(self) -> None:
        """End the watches that are left, and restore the signal's handler."""
        global runner
        for guard in self._guards:
            guard.watcher.stop()
        if self._handler is not None:
            signal.signal(*self._handler)
        runner = None

    # -- shared by the hooks

    def raise_for(self, item: pytest.Item) -> None:
        """Raise `ProcessDiedError` if a test depends on a dead process."""
        for guard in self._guards:
            if guard.concerns(item) and not guard.watcher.stopped.is_set():
                raise guard.report()

    # -- the interruption

    def _interrupt(self) -> None:
        if self._handler is not None:
            signal.pthread_kill(threading.main_thread().ident or 0, self._handler[0])

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        __tracebackhide__ = True
        if self._phase is None:
            return
        item, when = self._phase
        for guard in self._guards:
            if not guard.reported and guard.concerns(item):
                # During setup an `Exception`: code that cleans up after a failed setup often catches nothing else.
                raise guard.report(ProcessDiedDuringTestError if when == "call" else ProcessDiedError)


#: The instance of this process, which `fail_fast.watch` uses.
runner: FailByName | None = None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test that depends on a dead process before its fixtures are set up, unless the test is skipped."""
    if runner is not None:
        runner.raise_for(item)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's options."""
    group = parser.getgroup("sglang-crashkit")
    group.addoption(
        "--crashkit-evidence",
        metavar="FOLDER",
        help="where the stacks of the surviving processes go",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Create and register the plugin's instance."""
    global runner
    runner = FailByName(config)
    config.pluginmanager.register(runner)


@pytest.fixture(scope="session")
def crashkit_watch() -> Any:
    """Watch processes until the end of a ``with`` block: `sglang_crashkit.test.fail_fast.watch`."""
    from sglang_crashkit.test.fail_fast import watch

    return watch
