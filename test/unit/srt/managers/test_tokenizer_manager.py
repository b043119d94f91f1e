from __future__ import annotations

import errno
import os
import pickle
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.procfs import server_key
from sglang_crashkit.settings import fallback_folder
from sglang_crashkit.srt.managers import tokenizer_manager
from sglang_crashkit.srt.managers.tokenizer_manager import (
    on_crash_dump,
    on_orderly_exit,
    on_sigterm,
    open_crash_dump,
    safe_folder,
)
from unit.srt.conftest import Listener
from unit.support.small_disk import fill, mounted
from unit.support.waiting import LONG

FLAGS = ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH")


@pytest.fixture(autouse=True)
def keep_sigquit() -> Iterator[None]:
    before = signal.getsignal(signal.SIGQUIT)
    yield
    signal.signal(signal.SIGQUIT, before)


@pytest.fixture(autouse=True)
def hostname(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTNAME", "host")


class Manager:
    """What the hooks use of ``TokenizerManager``."""

    def __init__(self, folder: Path | None) -> None:
        self.crash_dump_folder = str(folder) if folder else None
        self.crash_dump_performed = False
        self.crash_dump_request_list: list[Any] = [1, 2]
        self.rid_to_state: dict[int, Any] = {n: SimpleNamespace(finished=n == 0) for n in range(4)}
        self.flags: list[str | None] = []
        self.meanwhile: Callable[[], object] = lambda: None
        self.error: BaseException | None = None
        self.server_args: object = None

    @on_crash_dump
    def dump_requests_before_crash(self, suffix: str = ".pkl", *, hostname: str = "host") -> str:
        """Upstream's docstring."""
        self.crash_dump_performed = True
        self.flags = [os.environ.get(name) for name in FLAGS]
        self.meanwhile()
        if self.error:
            raise self.error
        if self.crash_dump_folder:
            name = Path(self.crash_dump_folder) / hostname / f"dump{suffix}"
            data = {
                "server_args": {"api_key": "S3CRET"},
                "requests": ["a prompt"],
                "launch_command": "--api-key S3CRET",
            }
            with open_crash_dump(self, str(name), data) as file:
                pickle.dump(data, file)
        return "result"


def test_a_dump_is_announced_counted_and_waited_for(
    listener: Listener, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = Manager(tmp_path / "crash")
    assert manager.dump_requests_before_crash(suffix=".bin", hostname="host") == "result"
    assert listener.heard()["event"] == "crash_dump_begun"
    told = listener.heard()
    path = tmp_path / "crash" / "host" / "dump.bin"
    assert (told["event"], told["finished"], told["unfinished"], told["path"]) == ("crash_dump_ended", 2, 3, str(path))
    # Without secrets.
    assert pickle.loads(path.read_bytes())["requests"] == ["a prompt"]
    assert b"S3CRET" not in path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert "incident /incident" in caplog.text
    assert manager.dump_requests_before_crash.__doc__ == "Upstream's docstring."


def test_an_error_of_the_dump_is_told_without_secrets(
    listener: Listener, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = Manager(tmp_path)
    manager.server_args = SimpleNamespace(api_key="S3CRET-value")
    manager.rid_to_state = {0: SimpleNamespace(finished=False, obj=SimpleNamespace(text="tell me of the canary"))}
    manager.error = ValueError(f"cannot write S3CRET-value: tell me of the canary {'x' * 1_000_000}")
    assert manager.dump_requests_before_crash() is None
    listener.heard()
    told = listener.heard()
    # As far as a message has room.
    assert len(told["error"]) == 4000
    assert told["error"].rstrip("x") == "ValueError: cannot write <redacted>: <redacted> "
    assert told.get("path") is None
    assert "the requests could not be saved" in caplog.text


def test_without_a_crash_folder_the_reason_is_told(listener: Listener) -> None:
    Manager(None).dump_requests_before_crash()
    listener.heard()
    told = listener.heard()
    assert (told.get("path"), told["reason"]) == (None, "the server was started without --crash-dump-folder")


@pytest.mark.parametrize("handler", ["at work", "never", "dead", "removed"])
@pytest.mark.parametrize("error", [None, OSError(errno.ENOSPC, "No space left")])
@pytest.mark.parametrize(("with_folder", "value"), [(False, None), (True, "true")])
def test_the_kit_takes_over_upstreams_diagnostics_also_where_the_dump_fails(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    diagnosed: list[str],
    handler: str,
    error: Exception | None,
    with_folder: bool,
    value: str | None,
) -> None:
    if handler != "never":
        listener = request.getfixturevalue("listener")
        if handler != "at work":
            listener.kill()
        if handler == "removed":
            listener.path.unlink()
    for name in FLAGS:
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    sigquit = signal.getsignal(signal.SIGQUIT)
    manager = Manager(tmp_path if with_folder else None)
    manager.error = error
    assert manager.dump_requests_before_crash() == (None if error else "result")
    # Upstream's are off meanwhile: its own would wait for cores where there is no pipe.
    assert manager.flags == ["0", "0"]
    assert [os.environ.get(name) for name in FLAGS] == [value, value]
    manager.error = None
    manager.dump_requests_before_crash()
    # Without a handler they are made here, once.
    assert diagnosed == ([] if handler == "at work" else ["diagnosed"])
    assert handler == "at work" or signal.getsignal(signal.SIGQUIT) is sigquit


def test_a_handler_that_dies_does_not_delay_the_dump(listener: Listener, tmp_path: Path) -> None:
    manager = Manager(tmp_path)
    manager.meanwhile = listener.kill
    assert manager.dump_requests_before_crash() == "result"
    assert (tmp_path / "host" / "dump.pkl").exists()


@pytest.fixture
def diagnosed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whether the diagnostics were made in this process."""
    done: list[str] = []
    monkeypatch.setattr(tokenizer_manager, "diagnose_schedulers", lambda: done.append("diagnosed"))
    return done


def test_an_orderly_exit_is_no_crash(listener: Listener, tmp_path: Path, diagnosed: list[str]) -> None:
    manager = Manager(tmp_path)
    on_orderly_exit(manager)
    assert manager.dump_requests_before_crash() == "result"
    assert diagnosed == []
    tokenizer_manager.notify("told by the test")
    assert listener.heard()["event"] == "told by the test"


def test_an_exception_of_the_tokenizer_manager_is_told(listener: Listener, tmp_path: Path) -> None:
    manager = Manager(tmp_path)
    try:
        raise KeyError("rid")
    except KeyError:
        manager.dump_requests_before_crash()
    told = listener.heard()
    assert (told["event"], told["message"]) == ("exception", "KeyError: 'rid'")
    assert listener.heard()["event"] == "crash_dump_begun"


@pytest.mark.parametrize("with_handler", [False, True])
def test_another_thread_that_calls_waits_for_the_first(request: pytest.FixtureRequest, with_handler: bool) -> None:
    if with_handler:
        request.getfixturevalue("listener")
    order: list[str] = []
    begun, manager = threading.Event(), Manager(None)

    def take_long() -> None:
        begun.set()
        time.sleep(0.2)
        order.append("first is whole")

    def second() -> None:
        begun.wait(LONG)
        manager.dump_requests_before_crash()
        order.append("second returns")

    manager.meanwhile = take_long
    thread = threading.Thread(target=second)
    thread.start()
    assert manager.dump_requests_before_crash() == "result"
    thread.join(LONG)
    assert order == ["first is whole", "second returns"]


def test_another_sigquit_does_not_cut_the_dump_short(listener: Listener) -> None:
    calls = []
    signal.signal(signal.SIGQUIT, lambda *_: calls.append("upstream"))
    manager = Manager(None)
    manager.meanwhile = lambda: os.kill(os.getpid(), signal.SIGQUIT)
    assert manager.dump_requests_before_crash() == "result"
    assert calls == []


# -- open_crash_dump


def test_a_dump_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    manager = SimpleNamespace()
    path = tmp_path / "dump.pkl"
    before = os.umask(0)
    try:
        with open_crash_dump(manager, str(path), {}) as file:
            file.write(b"some")
            assert not path.exists()
            file.write(b"thing")
    finally:
        os.umask(before)
    assert path.read_bytes() == b"something"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["dump.pkl"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_a_torn_dump_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    manager = SimpleNamespace()

    def write_half() -> None:
        with open_crash_dump(manager, str(tmp_path / "dump.pkl"), {}) as file:
            file.write(b"half")
            raise error

    with pytest.raises(type(error)):
        write_half()
    assert list(tmp_path.iterdir()) == []
    assert vars(manager) == {}


def test_two_dumps_in_a_second_have_two_names(tmp_path: Path) -> None:
    names = []
    for text in (b"first", b"second", b"third"):
        manager = SimpleNamespace()
        with open_crash_dump(manager, str(tmp_path / "dump.pkl"), {}) as file:
            file.write(text)
        names.append(Path(*vars(manager).values()).name)
    assert names == ["dump.pkl", "dump.1.pkl", "dump.2.pkl"]
    assert [(tmp_path / name).read_bytes() for name in names] == [b"first", b"second", b"third"]


def test_what_this_process_left_torn_is_replaced_and_no_others(tmp_path: Path) -> None:
    stat = procfs.read_stat(os.getpid())
    other = tmp_path / f".dump.pkl.{server_key(stat.pid, stat.start_ticks + 1)}.partial"
    for torn in (tmp_path / f".dump.pkl.{server_key(stat.pid, stat.start_ticks)}.partial", other):
        torn.write_bytes(b"old")
    with open_crash_dump(SimpleNamespace(), str(tmp_path / "dump.pkl"), {}) as file:
        file.write(b"new")
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, "dump.pkl"]


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A shared crash folder in which somebody else made something of this host's name, and a fallback folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    (tmp_path / "temp").mkdir()
    crash = tmp_path / "crash"
    crash.mkdir()
    (tmp_path / "theirs").mkdir()
    if request.param == "link":
        (crash / "host").symlink_to(tmp_path / "theirs")
    else:
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        (crash / "host").mkdir()
        os.chown(crash / "host", 65534, 65534)
    return crash


@pytest.mark.parametrize("prepared", ["link", "their folder"], indirect=True)
@pytest.mark.parametrize("with_handler", [False, True])
def test_what_somebody_else_prepared_is_not_written_to(
    request: pytest.FixtureRequest, prepared: Path, caplog: pytest.LogCaptureFixture, with_handler: bool
) -> None:
    listener = request.getfixturevalue("listener") if with_handler else None
    Manager(prepared).dump_requests_before_crash()
    safe = prepared.parent / "temp" / f"sglang-crashkit-{os.geteuid()}" / "host"
    assert [path.name for path in safe.iterdir()] == ["dump.pkl"]
    assert stat.S_IMODE(safe.stat().st_mode) == 0o700
    assert [path for path in prepared.rglob("*") if path.name != "host"] == []
    assert list((prepared.parent / "theirs").iterdir()) == []
    assert f"the requests go to {safe}" in caplog.text
    if listener is not None:
        listener.heard()
        assert listener.heard()["path"] == str(safe / "dump.pkl")


# -- on_sigterm


@pytest.mark.parametrize(("status", "unhealthy"), [("UnHealthy", True), ("Up", False), (None, False)])
def test_sigterm_is_announced_with_the_health_and_handled_as_before(
    listener: Listener, status: str | None, unhealthy: bool
) -> None:
    @on_sigterm
    def handler(self: object, signum: int | None = None, frame: object = None) -> tuple[object, int | None]:
        return (self, signum)

    manager = SimpleNamespace(server_status=SimpleNamespace(name=status)) if status else None
    its = SimpleNamespace(tokenizer_manager=manager)
    assert handler(its, signum=15) == (its, 15)
    told = listener.heard()
    assert (told["event"], told["unhealthy"]) == ("draining", unhealthy)


@pytest.fixture(autouse=True)
def fallback(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
    return fallback_folder()


def remount(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True, timeout=30)


@pytest.mark.parametrize(
    ("spoil", "reason"), [(fill, "the disk is full"), (remount, "it cannot be written to")], ids=["full", "read-only"]
)
def test_where_a_folder_takes_no_more_the_fallback_does(
    tmp_path: Path, fallback: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None], reason: str
) -> None:
    with mounted(tmp_path / "small") as folder:
        assert safe_folder(folder / "host") == folder / "host"
        spoil(folder)
        assert safe_folder(folder / "host") == fallback / "host"
    assert f"no requests can be saved in {folder}/host ({reason}): the requests go to {fallback}/host" in caplog.text
