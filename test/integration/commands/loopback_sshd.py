"""A real sshd on the loopback address: its port, keys and files are its own, and it is no service of the machine.

::

    with Sshd(folder, ["h0", "h1"]) as sshd:
        subprocess.run([*sshd.command, "h0", "hostname"])
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from lanelib.servers import free_port
from unit.support.keeper import Daemon
from unit.support.waiting import LONG, wait_until

#: Says to what it is run with ssh by which name it was reached.
HOST_VARIABLE = "CRASHKIT_TEST_HOST"
#: Where sshd is, which a user's PATH does not lead to.
_SYSTEM_PATH = "/usr/sbin:/sbin"
#: Where an sshd that root starts has an empty folder for its unprivileged part; Debian's service makes it.
_EMPTY = Path("/run/sshd")
_DAEMON = """
ListenAddress 127.0.0.1:{port}
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/authorized_keys
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UsePAM no
StrictModes no
UseDNS no
AcceptEnv {variable}
MaxStartups 100
"""
_HOST = """
Host {host}
  HostName 127.0.0.1
  Port {port}
  IdentityFile {folder}/{key}
  HostKeyAlias {alias}
  SetEnv {variable}={host}
"""
_EVERY_HOST = """
Host *
  User {user}
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile none
  StrictHostKeyChecking yes
"""


def why_not() -> str:
    """Return why there can be no sshd on this machine; empty where there can be one."""
    found = [shutil.which(program, path=_path()) for program in ("ssh", "ssh-keygen", "sshd")]
    return "" if all(found) else "no ssh and sshd on this machine; next: apt-get install openssh-server"


def _path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM_PATH}"


class Sshd(Daemon):
    """An sshd, and names by which it is reached; to be used as a context manager.

    Attributes:
        command: the words of an ssh that knows them: those given, and ``locked``, which takes none of the keys,
            ``stranger``, whose key is not known, and ``gone``, where nothing listens.
    """

    def __init__(self, folder: Path, hosts: Sequence[str]) -> None:
        self._folder, self._port = folder, free_port()
        for name in ("host_key", "key", "foreign_key"):
            keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(keygen, check=True, timeout=LONG, stdin=subprocess.DEVNULL)
        (folder / "authorized_keys").write_text((folder / "key.pub").read_text())
        (folder / "known_hosts").write_text(f"loopback {(folder / 'host_key.pub').read_text()}")
        common = {"folder": folder, "variable": HOST_VARIABLE, "port": self._port}
        (folder / "sshd_config").write_text(_DAEMON.format(**common))
        usual = common | {"key": "key", "alias": "loopback"}
        blocks = [
            *(_HOST.format(**usual, host=host) for host in hosts),
            _HOST.format(**usual | {"key": "foreign_key"}, host="locked"),
            _HOST.format(**usual | {"alias": "elsewhere"}, host="stranger"),
            _HOST.format(**usual | {"port": free_port()}, host="gone"),
            _EVERY_HOST.format(folder=folder, user=getpass.getuser()),
        ]
        (folder / "ssh_config").write_text("".join(blocks))
        self.command = ["ssh", "-F", str(folder / "ssh_config")]
        self._process: subprocess.Popen[bytes] | None = None

    def _start(self) -> None:
        program = shutil.which("sshd", path=_path())
        assert program is not None
        if os.geteuid() == 0:
            _EMPTY.mkdir(mode=0o755, exist_ok=True)
        log = self._folder / "sshd.log"
        with log.open("wb") as file:
            argv = [program, "-D", "-e", "-f", str(self._folder / "sshd_config")]
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        wait_until(self._listens, f"sshd listens\n{log.read_text()}")

    def close(self) -> None:
        """End it; a connection that it has taken ends with its client."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(LONG)

    def _listens(self) -> bool:
        assert self._process.poll() is None, (self._folder / "sshd.log").read_text()
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self._port)) == 0
