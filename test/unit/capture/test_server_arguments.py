from __future__ import annotations

import pytest

from sglang_crashkit.capture.server_arguments import port_of, rendezvous_of, serves_tls, side_of

SERVER = ["python", "-m", "sglang.launch_server", "--tp", "16"]


@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        (["--dist-init-addr", "10.0.0.1:5000"], "10.0.0.1:5000"),
        (["--dist-init-addr=[fd00::1]:5000"], "[fd00::1]:5000"),
        (["--nccl-init-addr", "10.0.0.1:5000"], "10.0.0.1:5000"),
        (["--dist-init-addr"], None),
        (["--dist-init-address", "x"], None),
        ([], None),
    ],
)
def test_the_address_where_the_hosts_of_a_server_meet(arguments: list[str], address: str | None) -> None:
    assert rendezvous_of([*SERVER, *arguments]) == address


@pytest.mark.parametrize(
    ("arguments", "side"),
    [
        (["--disaggregation-mode", "prefill"], "prefill"),
        (["--disaggregation-mode=decode"], "decode"),
        (["--disaggregation-mode", "null"], None),
        ([], None),
    ],
)
def test_the_side_of_a_prefill_and_decode_pair(arguments: list[str], side: str | None) -> None:
    assert side_of([*SERVER, *arguments]) == side


@pytest.mark.parametrize(
    ("arguments", "port"),
    [(["--port", "8000"], 8000), (["--port=8000"], 8000), ([], 30000), (["--port", "x"], 30000), (["--port"], 30000)],
)
def test_the_port_on_which_the_server_answers(arguments: list[str], port: int) -> None:
    assert port_of([*SERVER, *arguments]) == port


@pytest.mark.parametrize(("arguments", "tls"), [(["--ssl-certfile", "cert.pem"], True), ([], False)])
def test_whether_the_server_answers_https(arguments: list[str], tls: bool) -> None:
    assert serves_tls([*SERVER, *arguments]) is tls
