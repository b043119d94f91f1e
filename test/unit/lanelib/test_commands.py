from __future__ import annotations

import http.server
import os
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lanelib import commands, procs
from lanelib.commands import NO_END, LaneError, clean_environment, run_command, run_in_terminal, run_script
from unit.support.waiting import LONG, wait_until


def test_clean_environment_drops_what_misleads_a_child_python(monkeypatch):
    for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "SGLANG_X", "SGLANG_Y_Z", "KEPT"):
        monkeypatch.setenv(name, "1")

    assert {"SGLANG_X", "KEPT"} <= clean_environment().keys()
    env = clean_environment(without=("SGLANG_",), kept=("SGLANG_Y",))
    assert {"SGLANG_Y_Z", "KEPT"} <= env.keys()
    assert not {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "SGLANG_X"} & env.keys()


#: A certificate authority of its own, and the certificate that it gives a server on this machine.
AUTHORITY = ("-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=own authority")
SERVER = (
    *("-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=index", "-CA", "ca.pem", "-CAkey", "ca.key"),
    *("-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"),
)


class EmptyIndex(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def index_url(tmp_path):
    """A package index whose certificate comes from an authority that is in the folder `certs` alone."""
    for options in (AUTHORITY, SERVER):
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *options]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=LONG)
    (tmp_path / "certs").mkdir()
    (tmp_path / "ca.pem").rename(tmp_path / "certs/ca-certificates.crt")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), EmptyIndex) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"https://127.0.0.1:{server.server_port}/simple"
        server.shutdown()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts over the system's certificates, which only root may")
def test_uv_trusts_what_the_systems_certificates_trust(tmp_path, index_url, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("SSL_", "UV_"))]:
        monkeypatch.delenv(name)
    mounted = ["unshare", "-m", "sh", "-c", 'mount --bind "$0" /etc/ssl/certs && exec "$@"', tmp_path / "certs"]
    uv = [Path(sys.executable).with_name("uv"), "pip", "install", "--python", sys.executable, "--no-cache", "--dry-run"]
    with pytest.raises(LaneError) as caught:
        run_command([*mounted, *uv, "--index-url", index_url, "no-such-package"], timeout_s=LONG)
    assert "no-such-package was not found in the package registry" in caught.value.message, caught.value.message


def test_a_failed_or_missing_program_is_named_with_its_output(programs, capsys):
    source = "import sys; print(*range(100), sep='\\n'); sys.exit(7)"
    with pytest.raises(LaneError, match="exit status 7") as caught:
        run_command([sys.executable, "-c", source], timeout_s=LONG)
    assert caught.value.message.splitlines()[-15:] == [str(number) for number in range(85, 100)]

    assert run_script("lane", lambda: run_command(["no-such-program"], timeout_s=5)) == 1
    assert capsys.readouterr().err == (
        "lane: cannot run no-such-program: No such file or directory\n  next: install no-such-program\n"
    )


def test_children_are_killed_at_the_deadline(tmp_path):
    source = "sleep 600 & echo $! > $0; exec sleep 600"
    with pytest.raises(LaneError, match="no end after 1 s"):
        run_command(["sh", "-c", source, tmp_path / "pid"], timeout_s=1)
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: procs.alive(one for one in [procs.read_process(pid)] if one) == [], "the child is gone")


@pytest.mark.parametrize("ignored", ["", "import signal; signal.signal(2, signal.SIG_IGN); "])
def test_a_check_is_interrupted_at_its_end_and_then_killed(monkeypatch, capsys, ignored):
    monkeypatch.setattr(commands, "END_S", 1)
    source = f"{ignored}import time; time.sleep(600)"
    assert run_in_terminal([sys.executable, "-c", source], timeout_s=1, env=os.environ) == NO_END
    assert "no end after 1 s" in capsys.readouterr().err
    assert run_in_terminal([sys.executable, "-c", "raise SystemExit(5)"], timeout_s=LONG, env=os.environ) == 5
