"""The pytest plugin: when a watched process ends, the test that depends on it fails at once, by name.

::

    @pytest.fixture(scope="class")
    def pair(crashkit_watch):
        with start_pair() as pair, crashkit_watch(lambda: [("prefill", pair.prefill), ("decode", pair.decode)]):
            yield pair

In unittest's ``setUpClass`` the same is `sglang_crashkit.test.fail_fast.watch`; the watch is ended before the processes
are. A test that depends on the fixture, or the part of its setup that runs, is interrupted by an exception in the main
thread, which a signal raises there even while it waits for an answer. The tests after it that depend on the same
fixture fail before they begin. Everything else goes on: other tests, teardown, reports, coverage.
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
    """A process that the test depends on has ended."""


class ProcessDiedDuringTestError(BaseException):
    """A process that the running test depends on has ended.

    Not an `Exception`: a test that repeats what failed would go on against a dead server.
    """


@dataclass(eq=False)
class Guard:
    """A watch, and which tests depend on it."""

    watcher: Watcher
    owner: str  # the fixture or the test that began it
    is_fixture: bool
    param: object = None  # of the fixture
    reported: bool = False  # the death is in a report, or interrupts the test that will have it in one
    is_over: bool = False  # the fixture is torn down: what has its name later is of other processes

    def names(self, item: pytest.Item) -> bool:
        """Say whether a test depends on the fixture, or is the test."""
        if not self.is_fixture:
            return self.owner == item.nodeid
        params = getattr(getattr(item, "callspec", None), "params", {})
        return self.owner in getattr(item, "fixturenames", ()) and params.get(self.owner, self.param) is self.param

    def concerns(self, item: pytest.Item) -> bool:
        """Say whether a test depends on the watched processes, one of which has ended."""
        return self.watcher.death is not None and not self.is_over and self.names(item)

    def report(self, kind: type[BaseException] = ProcessDiedError) -> BaseException:
        """Return the exception that says what is known of the death."""
        assert self.watcher.death is not None
        self.reported = True
        return kind("\n".join(self.watcher.death.lines()))


class FailByName:
    """The runner of this process, and its hooks."""

    def __init__(self, config: pytest.Config) -> None:
        folder = config.getoption("crashkit_evidence")
        self._folder = Path(folder).absolute() if folder else None
        self._guards: list[Guard] = []
        self._phase: tuple[pytest.Item, str] | None = None
        self._fixtures: list[tuple[str, object]] = []
        self._handler: tuple[int, Any] | None = None

    def watch(self, source: Source, *, folder: Path | None = None) -> Watcher:
        """Watch processes for the tests that depend on the fixture that is being set up, or for the running test."""
        from sglang_crashkit.test.fail_fast import Watcher

        watcher = Watcher(source, lambda _death: self._interrupt(), folder=folder or self._folder)
        test = self._phase[0].nodeid if self._phase else ""
        owner, param = self._fixtures[-1] if self._fixtures else (test, None)
        self._guards.append(Guard(watcher, owner, is_fixture=bool(self._fixtures), param=param))
        if self._handler is None and threading.current_thread() is threading.main_thread():
            # Real-time signals, because the others have uses: SIGALRM is pytest-timeout's, SIGUSR1 faulthandler's.
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
        """Know whose watch it is that begins meanwhile."""
        self._fixtures.append((fixturedef.argname, getattr(request, "param", None)))
        try:
            return (yield)
        finally:
            self._fixtures.pop()

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        """Know that no later test depends on what the fixture gave."""
        for guard in self._guards:
            guard.is_over |= guard.is_fixture and guard.owner == fixturedef.argname

    # Innermost, so that only the test's and its fixtures' code is ever interrupted, not other plugins'.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """Let the setup be interrupted."""
        self._phase = (item, "setup")
        try:
            return (yield)
        finally:
            self._phase = None

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Let the test be interrupted."""
        self._phase = (item, "call")
        try:
            self.raise_for(item)
            return (yield)
        finally:
            self._phase = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        """Report a death that no test has reported; a teardown itself is never interrupted."""
        result = yield
        for guard in self._guards:
            if guard.watcher.death is not None and not guard.reported and guard.names(item):
                raise guard.report()
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Name the dead process as the cause where the test failed of its consequences first."""
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
        """Say who died, and where the evidence is."""
        deaths = [guard.watcher.death for guard in self._guards if guard.watcher.death is not None]
        if not deaths:
            return
        # Most runs have none, and need nothing of the kit.
        from sglang_crashkit.visible import visible

        terminalreporter.section("processes that ended unexpectedly")
        for death in deaths:
            for line in death.lines():
                terminalreporter.write_line(visible(line))

    def pytest_unconfigure(self) -> None:
        """End what is left."""
        global runner
        for guard in self._guards:
            guard.watcher.stop()
        if self._handler is not None:
            signal.signal(*self._handler)
        runner = None

    # -- what they share

    def raise_for(self, item: pytest.Item) -> None:
        """Raise `ProcessDiedError` where a test depends on a dead process."""
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
                # What cleans up after a failed setup often catches Exception only.
                raise guard.report(ProcessDiedDuringTestError if when == "call" else ProcessDiedError)


#: That of this process; see `fail_fast.watch`.
runner: FailByName | None = None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test that depends on a dead process before its fixtures are set up, but not one that is skipped."""
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
    """Put the runner in place."""
    global runner
    runner = FailByName(config)
    config.pluginmanager.register(runner)


@pytest.fixture(scope="session")
def crashkit_watch() -> Any:
    """Watch processes until the end of a ``with`` block: `sglang_crashkit.test.fail_fast.watch`."""
    from sglang_crashkit.test.fail_fast import watch

    return watch
