"""A real Slurm with two nodes on this machine: Debian's slurm-wlm and munge, everything of it in one folder.

::

    with Cluster() as cluster, cluster.allocate() as job:
        cluster.run(["srun", f"--jobid={job}", "hostname"])
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from lanelib.commands import clean_environment
from lanelib.procs import read_process, send
from lanelib.servers import free_port
from unit.support.keeper import Daemon, Keeper
from unit.support.waiting import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")
PACKAGES = ("slurm-wlm", "munge")
NODES = ("n1", "n2")
#: Longer than anything takes on a loaded machine, in seconds.
LONG_S = 120.0
#: Where a daemon is that a user's PATH does not lead to.
_SYSTEM_PATH = "/usr/sbin:/sbin"

_CONF = """
ClusterName=crashkit
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmUser=root
FirstJobId={first_job}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
ReturnToService=2
# A node whose slurmd was stopped by a test keeps its job.
SlurmdTimeout=3600
KillWait=2
MailProg=/bin/true
SlurmctldDebug=info
SlurmdDebug=info
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


#: How a node runs the container of ``srun --container``; what Slurm's manual has for runc.
_OCI = "".join(
    f'RunTime{what}="runc --root={{folder}}/runc {command} %n.%u.%j.%s.%t{more}"\n'
    for what, command, more in (
        ("Query", "state", ""),
        ("Kill", "kill -a", ""),
        ("Delete", "delete --force", ""),
        ("Run", "run", " -b %b"),
    )
)


def why_not() -> str:
    """Return why there can be no Slurm on this machine; empty where there can be one."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    if missing:
        return f"no {', '.join(missing)} on this machine; next: apt-get install {' '.join(PACKAGES)}"
    return "" if os.geteuid() == 0 else "a Slurm of its own needs root"


def _path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM_PATH}"


class Cluster(Daemon):
    """A controller and two nodes; to be used as a context manager.

    Attributes:
        folder: everything it writes.
        environ: what a program needs in its environment to talk to it.
    """

    def __init__(self) -> None:
        # Short, for sockets lie in it, and others may pass through it, for so munge wants it.
        self.folder = Path(tempfile.mkdtemp(prefix="crashkit-slurm-"))
        self.folder.chmod(0o711)
        self.environ = clean_environment() | {"PATH": _path(), "SLURM_CONF": str(self.folder / "slurm.conf")}
        self._keeper: Keeper | None = None
        self._slurmds: dict[str, int] = {}

    def run(self, argv: Sequence[str]) -> str:
        """Run a client in the cluster's folder and return what it printed.

        Raises:
            AssertionError: it failed.
        """
        done = subprocess.run(
            list(argv),
            env=self.environ,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=LONG_S,
            check=False,
        )
        assert done.returncode == 0, f"{argv}: {done.returncode}\n{done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    @contextlib.contextmanager
    def start(self, argv: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
        """Run a client in the background, and end it, and with it its step, at the end of the block."""
        with subprocess.Popen(list(argv), env=self.environ, stdin=subprocess.DEVNULL) as process:
            try:
                yield process
            finally:
                process.terminate()
                try:
                    process.wait(LONG_S)
                except subprocess.TimeoutExpired:
                    process.kill()

    def allocate(self, *, nodes: int = 2) -> contextlib.AbstractContextManager[str]:
        """Give `nodes` nodes to a job without processes; see `batch`."""
        return self.batch("while :; do sleep 60; done", nodes=nodes)

    @contextlib.contextmanager
    def batch(self, script: str, *, nodes: int = 2) -> Iterator[str]:
        """Run lines of shell as a job on `nodes` nodes, and yield its id once it runs; it is over with the block.

        What it prints is in ``job-ID.log`` in the cluster's folder.
        """
        path = self.folder / f"job-{secrets.token_hex(4)}.sh"
        path.write_text(f"#!/bin/bash\n{script}\n")
        log = self.folder / "job-%j.log"
        argv = [
            "sbatch",
            "--parsable",
            f"--nodes={nodes}",
            "--cpus-per-task=4",
            "--mem=1000",
            f"--output={log}",
            str(path),
        ]
        job = self.run(argv).strip()
        try:
            wait_until(lambda: self.state(job) == "RUNNING", f"job {job} runs\n{self.logs()}", LONG_S)
            yield job
        finally:
            self.run(["scancel", job])
            over = {"", "CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL"}
            wait_until(lambda: self.state(job) in over, f"job {job} is over", LONG_S)

    def bundle(self, writable: Sequence[Path], places: Sequence[Path]) -> Path:
        """Make an OCI bundle for ``srun --container``: an empty root with folders of this machine, and its network."""
        bundle = Path(tempfile.mkdtemp(prefix="bundle-", dir=self.folder))
        (bundle / "rootfs").mkdir()
        self.run(["runc", "spec", f"--bundle={bundle}"])
        config = json.loads((bundle / "config.json").read_text())
        config["process"]["terminal"] = config["root"]["readonly"] = False
        spaces = config["linux"]["namespaces"]
        config["linux"]["namespaces"] = [space for space in spaces if space["type"] != "network"]
        for mode, paths in (("rw", writable), ("ro", places)):
            mount = {"type": "bind", "options": ["rbind", mode]}
            config["mounts"] += [mount | {"source": str(p), "destination": str(p)} for p in paths if p.exists()]
        (bundle / "config.json").write_text(json.dumps(config))
        return bundle

    def state(self, job: str) -> str:
        """Return the state of a job, such as RUNNING; empty once Slurm knows nothing more of it."""
        return self.run(["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"]).strip()

    def steps(self, job: str) -> list[str]:
        """Return the names of the steps of a job that run now, but that of its script."""
        printed = self.run(["squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%j"])
        return [name for name in printed.split() if name not in {"batch", "extern"}]

    @contextlib.contextmanager
    def without_node(self, node: str, number: signal.Signals = signal.SIGKILL) -> Iterator[None]:
        """Kill the slurmd of a node, or stop it with SIGSTOP, until the end of the block; its job's processes go on."""
        process = read_process(self._slurmds[node])
        assert process is not None, f"no slurmd of {node}"
        send(process, number)
        try:
            state = {signal.SIGKILL: (None, "Z"), signal.SIGSTOP: ("T",)}[number]
            stopped = f"slurmd of {node} is stopped"
            wait_until(lambda: getattr(read_process(process.pid), "state", None) in state, stopped)
            yield
        finally:
            self.start_node(node)

    def start_node(self, node: str) -> None:
        """Start the slurmd of a node again, or let it go on, and wait until the node answers."""
        process = read_process(self._slurmds.get(node, 0))
        if process is not None and process.state == "T":
            send(process, signal.SIGCONT)
        else:
            self._slurmds[node] = self._launch("slurmd", "-D", "-N", node)
        wait_until(lambda: self._answers(node), f"node {node} answers\n{self.logs()}", LONG_S)

    def logs(self) -> str:
        """Return the end of what its daemons printed."""
        found = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in found)

    def close(self) -> None:
        """End it, its jobs and all of their processes, and remove its folder."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        (self.folder / "state").mkdir()
        for node in NODES:
            (self.folder / f"spool-{node}").mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        host = socket.gethostname().split(".")[0]
        ports = [free_port() for _ in ("slurmctld", *NODES)]
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=4000 State=UNKNOWN"
            for node, port in zip(NODES, ports[1:], strict=True)
        )
        # The processes of two clusters on one machine are told apart by their jobs.
        first_job = 1000 + secrets.randbelow(10**6)
        conf = _CONF.format(host=host, port=ports[0], folder=self.folder, nodes=nodes, first_job=first_job)
        (self.folder / "slurm.conf").write_text(conf)
        (self.folder / "oci.conf").write_text(_OCI.format(folder=self.folder))
        self._keeper = Keeper()
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self._launch(
            "munged", "--foreground", "--force", "--num-threads=2", f"--socket={self.folder}/munge.socket", *files
        )
        wait_until(lambda: (self.folder / "munge.socket").exists(), "munged listens", LONG_S)
        self._launch("slurmctld", "-D", "-c")
        for node in NODES:
            self.start_node(node)

    def _launch(self, name: str, *arguments: str) -> int:
        """Start a daemon and return its pid."""
        program = shutil.which(name, path=_path())
        assert program is not None
        assert self._keeper is not None
        log = self.folder / f"{name}{arguments[-1] if name == 'slurmd' else ''}.log"
        return self._keeper.start([program, *arguments], log, self.environ)

    def _answers(self, node: str) -> bool:
        done = subprocess.run(
            ["sinfo", "--noheader", f"--nodes={node}", "--format=%T"],
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=LONG_S,
            check=False,
        )
        # A state that ends with a star is that of a node which does not answer.
        return done.stdout.strip() in {"idle", "mixed", "allocated", "completing"}
