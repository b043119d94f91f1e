from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_crashkit.notifications import post
from sglang_crashkit.notifications.messages import signature_of
from sglang_crashkit.notifications.plan import SECRET, WEBHOOK
from unit.notifications.hook import hook

BODY = b'{"kind": "killed"}'


def send(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str, *options: str) -> str:
    monkeypatch.setenv(WEBHOOK, url)
    monkeypatch.setattr(sys, "argv", ["post", *options])
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(BODY)))
    assert post.main() == 0
    return capsys.readouterr().out.strip()


@pytest.mark.parametrize("status", [200, 404, 503])
def test_the_status_of_the_answer_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    with hook(status) as server:
        assert send(monkeypatch, capsys, server.url) == str(status)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_no_redirect_is_followed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    with hook() as other, hook(status, location=other.url) as server:
        assert send(monkeypatch, capsys, server.url) == str(status)
        assert other.bodies == []


def test_a_body_is_signed_and_a_token_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv(SECRET, "of both")
    (tmp_path / "token").write_text("abc\n")
    with hook(200) as server:
        send(monkeypatch, capsys, server.url, "--token-file", str(tmp_path / "token"))
    (headers,), (body,) = server.headers, server.bodies
    signature = signature_of("of both", headers["X-Crashkit-Timestamp"], BODY)
    assert (body, headers["X-Crashkit-Signature"]) == (BODY, f"sha256={signature}")
    assert headers["Authorization"] == "Bearer abc"


@pytest.mark.parametrize(
    ("url", "name"), [("http://127.0.0.1:1/key", "ConnectionRefusedError: "), ("http://x:key/", "InvalidURL")]
)
def test_a_failure_is_named_without_the_url(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str, name: str
) -> None:
    said = send(monkeypatch, capsys, url)
    assert said.startswith(name)
    assert "key" not in said


def test_an_authority_that_cannot_be_read_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "ca").write_text("no certificate")
    said = send(monkeypatch, capsys, "https://127.0.0.1:1/", "--ca-file", str(tmp_path / "ca"))
    assert said.startswith("SSLError: ")
