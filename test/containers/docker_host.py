"""A Docker of the test's own: Debian's daemon, with everything of it in one folder, and servers of a lane in it.

::

    with DockerHost() as docker, docker.serve(ensure_lane("0.5.23"), volume) as server:
        server.wait_ready()
        docker.run("stop", server.name)

The image is empty, but in `test_images`. What a server runs is this machine's own, and the lane, mounted read-only at
the same places.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from lanelib.commands import clean_environment
from lanelib.lanes import Lane
from lanelib.paths import ROOT
from lanelib.procs import Process, read_process, send, wait_gone
from lanelib.servers import ManagedProcess, command_of, free_port, parallel_env
from unit.support.keeper import Daemon, Keeper
from unit.support.server_driver import HOST
from unit.support.waiting import wait_until

PROGRAMS = ("dockerd", "docker", "containerd", "runc")
PACKAGE = "docker.io"
#: Longer than anything takes on a loaded machine, in seconds.
LONG_S = 120.0
#: Where a daemon is that a user's PATH does not lead to, and Debian's client rather than another one.
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
#: The image with nothing in it but a temporary folder.
EMPTY = "empty"
#: What programs need of this machine.
# Docker puts its own init into /sbin.
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin/ldconfig")
#: Where a container has the volume for its incidents.
CRASH = "/var/crash"


def why_not() -> str:
    """Return why there can be no Docker on this machine; empty where there can be one."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=_PATH) is None]
    if missing:
        return f"no {', '.join(missing)} on this machine; next: apt-get install {PACKAGE}"
    return "" if os.geteuid() == 0 else "a Docker of its own needs root"


class DockerHost(Daemon):
    """A daemon without a network of its own; to be used as a context manager.

    Attributes:
        folder: everything it writes.
    """

    def __init__(self) -> None:
        # Short, for sockets lie in it.
        self.folder = Path(tempfile.mkdtemp(prefix="ck-docker-"))
        self._environ = {"PATH": _PATH, "HOME": str(self.folder), "DOCKER_HOST": f"unix://{self.folder}/sock"}
        self._keeper: Keeper | None = None
        self._daemon: Process | None = None

    def command(self, *arguments: str) -> list[str]:
        """Return the command of Docker's client that talks to this daemon."""
        return ["env", *(f"{name}={value}" for name, value in self._environ.items()), "docker", *arguments]

    def run(self, *arguments: str, timeout_s: float = LONG_S) -> str:
        """Run Docker's client, and return what it prints."""
        done = subprocess.run(
            self.command(*arguments), capture_output=True, text=True, timeout=timeout_s, check=False, errors="replace"
        )
        assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr}\n{self.log()}"
        return done.stdout.strip()

    def serve(
        self,
        lane: Lane,
        volume: Path,
        *options: str,
        env: Mapping[str, str] | None = None,
        tp: int = 2,
        prefix: Sequence[str] = (),
        image: str = EMPTY,
        python: str = "",
    ) -> Container:
        """Start a server of a lane in a container, whose incidents go to `volume`.

        `prefix` is a command in the container that runs the server's, `options` are more of ``docker run``, `python` is
        by default the lane's, or that of an image with a Python of its own.
        """
        argv = self.command("run", "--rm=false", "--network=host", *options)
        argv += read_only([*_SYSTEM, str(ROOT), *([str(base_of(lane))] if image == EMPTY else [])])
        argv += [] if any(f":{CRASH}" in option for option in options) else [f"--volume={volume}:{CRASH}"]
        outer = clean_environment()
        inner = {name: value for name, value in lane.serve_env().items() if outer.get(name) != value}
        # The root is empty: no /etc/passwd says whose process it is, which torch asks.
        inner |= {"HOME": "/tmp", "HOSTNAME": HOST, "USER": "sglang"} | parallel_env(lane, tp, 1)
        # As an image has it: the commands of its Python come first.
        inner["PATH"] = f"{lane.root if image == EMPTY else base_of(lane)}/bin:{os.defpath}"
        inner |= env or {}
        argv += [f"--env={name}={value}" for name, value in inner.items()]
        port = free_port()
        command = [str(word) for word in command_of(lane, port, tp=tp)]
        command[0] = python or (command[0] if image == EMPTY else str(base_of(lane) / "bin" / "python3"))
        command += ["--nccl-port", str(free_port()), "--crash-dump-folder", CRASH]
        return Container(self, lane, port, argv, [image, *prefix, *command])

    @contextlib.contextmanager
    def beside(self, *options: str) -> Iterator[str]:
        """Run a container that only waits, such as that of a pod's namespaces; yield its name."""
        name = f"beside-{secrets.token_hex(3)}"
        # As process 1 it is deaf to SIGTERM.
        argv = ["run", "--detach", "--stop-signal=KILL", f"--name={name}", "--network=host", *options]
        self.run(*argv, *read_only(_SYSTEM), EMPTY, "sleep", "infinity")
        try:
            yield name
        finally:
            self.run("rm", "--force", name)

    def log(self) -> str:
        """Return the end of what the daemon printed."""
        path = self.folder / "dockerd.log"
        return path.read_text(errors="replace")[-2000:] if path.is_file() else ""

    def close(self) -> None:
        """End it, its containers and all of their processes, and remove its folder."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            if self._daemon is not None:
                # By itself it takes its mounts away.
                send(self._daemon, signal.SIGTERM)
                wait_gone([self._daemon], LONG_S)
            keeper.close()
        places = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for mount in sorted((place for place in places if place.startswith(f"{self.folder}/")), reverse=True):
            subprocess.run(["umount", "--lazy", mount], capture_output=True, timeout=LONG_S, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        self._keeper = Keeper()
        program = shutil.which("dockerd", path=_PATH)
        assert program is not None
        at = [f"--{name}={self.folder}/{name}" for name in ("data-root", "exec-root", "pidfile")]
        argv = [program, *at, f"--host=unix://{self.folder}/sock", "--bridge=none", "--iptables=false"]
        argv += ["--ip-forward=false", "--log-level=warn"]
        pid = self._keeper.start(argv, self.folder / "dockerd.log", clean_environment() | self._environ)
        self._daemon = read_process(pid)
        asked = self.command("info")
        wait_until(
            lambda: subprocess.run(asked, capture_output=True, timeout=LONG_S, check=False).returncode == 0,
            f"the daemon answers\n{self.log()}",
            LONG_S,
        )
        with tarfile.open(self.folder / "empty.tar", "w") as tar:
            temporary = tarfile.TarInfo("tmp")
            temporary.type, temporary.mode = tarfile.DIRTYPE, 0o1777
            tar.addfile(temporary)
        self.run("import", str(self.folder / "empty.tar"), EMPTY)


def read_only(places: Iterable[str]) -> list[str]:
    """Return the options that give a container folders of this machine at the same places."""
    return [f"--volume={place}:{place}:ro" for place in places if Path(place).exists()]


def base_of(lane: Lane) -> Path:
    """Return the folder of the Python that a lane was made with."""
    return next(path for path in (lane.root / "bin" / "python").resolve().parents if path.name == "bin").parent


class Container(ManagedProcess):
    """A server as process 1 of a container; its log is what Docker's client prints of it.

    `popen` is the client, which ends with the container's exit code.
    """

    def __init__(
        self, docker: DockerHost, lane: Lane, port: int, argv: Sequence[str], image_and_command: Sequence[str]
    ) -> None:
        self._docker = docker
        self._first = 0
        name = f"sglang-{secrets.token_hex(3)}-{lane.name}"
        argv = [*argv, f"--name={name}", *image_and_command]
        super().__init__(name, argv, env=clean_environment(), host="127.0.0.1", port=port)

    @property
    def pid(self) -> int:
        """The pid of the container's process 1, as it is called outside; that of Docker's client before it runs."""
        if not self._first:
            argv = self._docker.command("inspect", "--format={{.State.Pid}}", self.name)
            done = subprocess.run(argv, capture_output=True, text=True, timeout=LONG_S, check=False)
            self._first = int(done.stdout) if done.returncode == 0 else 0
        return self._first or self.popen.pid

    def state(self, field: str) -> str:
        """Return what Docker says of its state, such as ``ExitCode`` or ``OOMKilled``."""
        return self._docker.run("inspect", f"--format={{{{.State.{field}}}}}", self.name)

    def execute(self, *argv: str, timeout_s: float = LONG_S) -> subprocess.CompletedProcess[str]:
        """Run a command in it, as ``docker exec`` does."""
        command = self._docker.command("exec", self.name, *argv)
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)

    def start_again(self) -> None:
        """Start it once more after its end, as ``docker start`` does; its log goes on."""
        self.popen.wait(LONG_S)
        self._first, self.ready_s = 0, None
        with self.log_path.open("ab") as log:
            self.popen = subprocess.Popen(
                self._docker.command("start", "--attach", self.name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=clean_environment(),
                start_new_session=True,
            )

    def stop(self, grace_s: float = LONG_S) -> None:
        """Kill and remove it, whatever it is about."""
        with contextlib.suppress(AssertionError):
            self._docker.run("rm", "--force", self.name)
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(timeout=grace_s)
