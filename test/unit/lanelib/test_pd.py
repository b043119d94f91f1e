from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lanelib import pd
from lanelib.commands import LaneError
from lanelib.lanes import Lane
from lanelib.procs import alive, tree_of
from lanelib.servers import ManagedProcess, Server


def test_a_missing_library_is_named_with_the_debian_packages(monkeypatch):
    def load(name):
        if name == "libibverbs.so.1":
            raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", load)

    with pytest.raises(LaneError, match="not installed: libibverbs1\n") as caught:
        pd.require_libraries()
    assert caught.value.next_step == "apt-get install libibverbs1 librdmacm1 libnuma1 liburing2 ibverbs-providers"


@pytest.fixture
def lane(tmp_path, monkeypatch) -> Lane:
    """A lane whose python sleeps, whatever it is told to run."""
    monkeypatch.setattr(pd, "require_libraries", lambda: None)
    monkeypatch.setattr(Lane, "knows_option", lambda lane, option: False)
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(120)\n")
    python.chmod(0o755)
    return Lane("0.5.23", False, tmp_path, None)


@pytest.fixture
def started(tmp_path, monkeypatch) -> list[Any]:
    """Every process that is started, with what it was told, and its log where it leaves nothing."""
    found: list[Any] = []
    start = ManagedProcess.__init__

    def note(self: Any, name: str, argv: Sequence[Any], **options: Any) -> None:
        start(self, name, argv, **options | {"log_path": tmp_path / f"{name}.log", "env": os.environ})
        found.append(self)

    monkeypatch.setattr(ManagedProcess, "__init__", note)
    return found


def words_of(server: ManagedProcess) -> list[str]:
    return [str(word) for word in server.popen.args]  # type: ignore[union-attr]


def test_the_router_knows_both_servers_and_all_three_end_together(lane, started):
    with pd.PDServers.start(lane, extra_args=["--log-level", "debug"]) as pair:
        assert started == [pair.prefill, pair.decode, pair.router]
        assert pair.members == tuple(started)
        router = words_of(pair.router)
        assert router[router.index("--prefill") + 1] == pair.prefill.url
        assert router[router.index("--decode") + 1] == pair.decode.url
        for server, mode in ((pair.prefill, "prefill"), (pair.decode, "decode")):
            words = words_of(server)
            assert words[words.index("--disaggregation-mode") + 1] == mode
            assert words[-2:] == ["--log-level", "debug"]
        running = [process for server in started for process in tree_of(server.pid)]
        assert {pid for pid, _ in pair.processes()} == {process.pid for process in running}

    assert alive(running) == []


def test_where_one_cannot_be_started_the_others_are_ended(lane, started, monkeypatch):
    def fail(lane: Lane, **options: Any) -> Server:
        if "decode" in options["extra_args"]:
            raise LaneError("no decode server")
        return start(lane, **options)

    start = Server.start
    monkeypatch.setattr(Server, "start", fail)

    with pytest.raises(LaneError, match="no decode server"):
        pd.PDServers.start(lane)

    assert [server.popen.returncode is not None for server in started] == [True]
    assert not Path(f"/proc/{started[0].pid}").exists()
