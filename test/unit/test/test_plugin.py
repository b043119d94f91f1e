"""The plugin in pytest runs of its own: who fails, of what, and that everything else goes on."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from inner_pytest import Run, run_pytest
from unit.support.waiting import LONG

HEAD = """
import signal, socket, subprocess, sys, threading, time, unittest
import pytest
from sglang_crashkit.test.fail_fast import watch

SLEEP = [sys.executable, "-c", "import time; time.sleep(120)"]

def start():
    return subprocess.Popen(SLEEP)

def kill_later(process, seconds=0.3):
    threading.Timer(seconds, process.kill).start()

def read_from_nobody():
    near, far = socket.socketpair()
    with near, far:
        near.recv(1)

def end(*processes):
    for process in processes:
        process.kill()
        process.wait()
"""


@pytest.fixture
def run(tmp_path: Path):
    def run_tests(source: str, *arguments: str) -> Run:
        (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\naddopts = --strict-markers\n")
        (tmp_path / "test_it.py").write_text(HEAD + textwrap.dedent(source))
        return run_pytest(
            ["-v", "--timeout=60", *arguments, tmp_path],
            report=tmp_path / "junit.xml",
            cwd=tmp_path,
            environ=os.environ | {"TMPDIR": str(tmp_path)},
            timeout_secs=LONG,
        )

    return run_tests


CLASS = """
@pytest.fixture(scope="class")
def pair(crashkit_watch):
    members = {"prefill": start(), "decode": start()}
    with crashkit_watch(members.items):
        yield members
    print("teardown ran", flush=True)
    end(*members.values())

class TestPair:
    def test_before(self, pair):
        pass

    def test_victim(self, pair):
        kill_later(pair["prefill"])
        read_from_nobody()

    def test_after(self, pair):
        read_from_nobody()

    @pytest.mark.skip(reason="not now")
    def test_skipped(self, pair):
        pass

def test_of_something_else():
    assert not {"torch", "sglang"} & set(sys.modules)
"""
UNITTEST = """
class TestUnittest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.process = cls.other = None
        cls.watch = watch(lambda: [("server", cls.process), ("other", cls.other)])
        cls.process, cls.other = start(), start()

    @classmethod
    def tearDownClass(cls):
        cls.watch.stop()
        end(cls.process, cls.other)
        print("teardown ran", flush=True)

    def test_1_before(self):
        pass

    def test_2_victim(self):
        kill_later(self.process)
        for _ in range(100):
            try:
                read_from_nobody()
            except Exception:
                continue

    def test_3_after(self):
        read_from_nobody()
"""


OWN_SERVERS = """
@pytest.fixture
def server(crashkit_watch):
    process = start()
    with crashkit_watch(lambda: [("server", process)]):
        yield process
    end(process)

class Test:
    def test_victim(self, server):
        kill_later(server)
        read_from_nobody()

    def test_of_its_own_fault(self, server):
        assert "own" == "fault"

@pytest.fixture(scope="class")
def broken(crashkit_watch):
    process = start()
    with crashkit_watch(lambda: [("broken", process)]):
        process.kill()
        raise OSError("no answer")

class TestBroken:
    def test_first(self, broken):
        pass

    def test_second(self, broken):
        pass

@pytest.fixture(scope="class")
def swallowed(crashkit_watch):
    process = start()
    try:
        with crashkit_watch(lambda: [("swallowed", process)]):
            process.kill()
            process.wait()
            time.sleep(30)
    except Exception:
        pass
    yield process

class TestSwallowed:
    def test_third(self, swallowed):
        raise ConnectionError("refused")

    def test_fourth(self, swallowed):
        raise ConnectionError("refused")

@pytest.fixture(scope="module", params=[1, 2])
def each(request, crashkit_watch):
    process = start()
    with crashkit_watch(lambda: [("each", process)]):
        yield process, request.param
    end(process)

def test_fifth(each):
    if each[1] == 1:
        each[0].kill()
        read_from_nobody()
"""


def test_a_later_test_is_told_of_its_own_server_only(run):
    result = run(OWN_SERVERS)
    assert result.outcomes == {
        "test_victim": ["failure"],
        "test_of_its_own_fault": ["failure"],
        "test_first": ["error"],
        "test_second": ["error"],
        "test_third": ["failure"],
        "test_fourth": ["failure"],
        "test_fifth[1]": ["failure"],
        "test_fifth[2]": ["passed"],
    }
    messages = result.messages
    assert "server (pid=" in messages["test_victim"]
    assert "'own' == 'fault'" in messages["test_of_its_own_fault"]
    assert "(pid=" not in messages["test_of_its_own_fault"]
    assert all("broken (pid=" in messages[name] for name in ("test_first", "test_second"))
    assert all("swallowed (pid=" in messages[name] for name in ("test_third", "test_fourth"))


def test_the_running_test_fails_by_name_and_others_go_on(run):
    result = run(UNITTEST + CLASS, "-s")
    assert result.outcomes == {
        "test_1_before": ["passed"],
        "test_2_victim": ["failure"],
        "test_3_after": ["error"],
        "test_before": ["passed"],
        "test_victim": ["failure"],
        "test_after": ["error"],
        "test_skipped": ["skipped"],
        "test_of_something_else": ["passed"],
    }
    assert result.status == 1
    for name in ("test_victim", "test_after"):
        assert "prefill (pid=" in result.messages[name]
        assert ") exited rc=-9" in result.messages[name]
        assert "meanwhile: decode: python" in result.messages[name]
    assert "server (pid=" in result.messages["test_2_victim"]
    assert "read_from_nobody" in result.output
    assert result.output.count("teardown ran") == 2
    assert "processes that ended unexpectedly" in result.output
    assert "Timeout" not in result.output
    assert result.seconds < 60


def test_a_broken_connection_is_explained_by_the_death_behind_it(run):
    result = run(
        """
        SERVE = [sys.executable, "-c", '''
        import os, socket, sys
        near = socket.socket(fileno=int(sys.argv[1]))
        near.recv(1)
        os._exit(5)
        '''.replace("        ", "")]

        @pytest.fixture
        def server(crashkit_watch):
            near, far = socket.socketpair()
            with far:
                process = subprocess.Popen([*SERVE, str(far.fileno())], pass_fds=[far.fileno()])
            with near, crashkit_watch([("server", process)]):
                yield near
            end(process)

        # Deaf to the interruption, so that what the test itself says comes first.
        signal.pthread_sigmask(signal.SIG_BLOCK, range(signal.SIGRTMIN, signal.SIGRTMAX + 1))

        def test_asks(server):
            server.send(b"?")
            assert server.recv(1) == b"!"

        class TestAsks(unittest.TestCase):
            def test_asks_too(self):
                near, far = socket.socketpair()
                with near, far:
                    process = subprocess.Popen([*SERVE, str(far.fileno())], pass_fds=[far.fileno()])
                    far.close()
                    with watch([("server", process)]):
                        near.send(b"?")
                        self.assertEqual(near.recv(1), b"!")
        """
    )
    for name in ("test_asks", "test_asks_too"):
        assert result.outcomes[name] == ["failure"]
        assert "server (pid=" in result.messages[name]
        assert "exited rc=5" in result.messages[name]
    assert result.output.count("AssertionError") >= 2, "what the test itself said is in the report as well"


MORE = """
@pytest.fixture(scope="class")
def pair(crashkit_watch):
    members = {"prefill": start()}
    try:
        with crashkit_watch(members.items):
            kill_later(members["prefill"])
            read_from_nobody()
            yield members
    except Exception:
        print("cleaned up", flush=True)
        raise

class TestDeathInSetup:
    def test_first(self, pair):
        pass
    def test_second(self, pair):
        pass

@pytest.fixture(scope="module")
def server(crashkit_watch):
    process = start()
    with crashkit_watch([("server", process)]) as watcher:
        watched.extend([process, watcher])
        yield process
    end(process)

watched = []

def test_1(server):
    pass

def test_2_unrelated():
    process, watcher = watched
    process.kill()
    while watcher.death is None:
        time.sleep(0.01)
    time.sleep(0.5)

def test_3(server):
    pass

def test_status_0():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"])
    with watch([("server", process)]):
        read_from_nobody()

def test_announced():
    members = {"server": start()}
    with watch(members.items):
        first = members.pop("server")
        time.sleep(0.5)
        end(first)
        members["server"] = start()
        time.sleep(0.5)
    end(members["server"])

@pytest.fixture
def dying(crashkit_watch):
    process = start()
    with crashkit_watch([("server", process)]) as watcher:
        yield process
        process.kill()
        watcher.settle()

def test_between(dying):
    pass
"""


def test_only_what_depends_on_the_dead_fails_whenever_they_die(run):
    result = run(MORE, "-s")
    between = result.outcomes.pop("test_between")
    assert result.outcomes == {
        "test_first": ["error"],
        "test_second": ["error"],
        "test_1": ["passed"],
        "test_2_unrelated": ["passed"],
        "test_3": ["error"],
        "test_status_0": ["failure"],
        "test_announced": ["passed"],
    }
    assert between in (["passed", "error"], ["error"])
    for name in ("test_first", "test_second"):
        assert "prefill (pid=" in result.messages[name]
    for name in ("test_3", "test_between"):
        assert "server (pid=" in result.messages[name]
    assert "exited rc=0" in result.messages["test_status_0"]
    assert "cleaned up" in result.output


@pytest.mark.wide
def test_the_stacks_of_the_survivors_go_where_they_are_wanted(run, tmp_path):
    run(CLASS, "--crashkit-evidence", str(tmp_path / "evidence"), "-k", "victim")
    (folder,) = (tmp_path / "evidence").iterdir()
    assert [path.name.split("-")[0] for path in folder.glob("*.txt")] == ["decode"]
