from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from sglang_crashkit.kernel.server_arguments import port_of, rendezvous_of, side_of

SERVER = ["python", "-m", "sglang.launch_server", "--tp", "16"]


@pytest.mark.parametrize(
    ("arguments", "port"),
    [(["--port", "8000"], 8000), (["--port=8000"], 8000), ([], 30000), (["--port", "x"], 30000), (["--port"], 30000)],
)
def test_the_port_on_which_the_server_answers(arguments: list[str], port: int) -> None:
    assert port_of([*SERVER, *arguments]) == port


@pytest.mark.parametrize(
    ("read", "arguments", "value"),
    [
        (rendezvous_of, ["--tp", "2", "--dist-init-addr", "10.0.0.1:5000"], "10.0.0.1:5000"),
        (rendezvous_of, ["--nccl-init-addr=[::1]:5000"], "[::1]:5000"),
        (rendezvous_of, ["--dist-init-addr"], None),
        (rendezvous_of, ["--tp", "2"], None),
        (side_of, ["--disaggregation-mode", "prefill"], "prefill"),
        (side_of, ["--disaggregation-mode=decode"], "decode"),
        (side_of, ["--disaggregation-mode", "null"], None),
        (side_of, [], None),
    ],
)
def test_the_rendezvous_and_the_side_of_a_pair_are_read(
    read: Callable[[Sequence[str]], str | None], arguments: list[str], value: str | None
) -> None:
    assert read(arguments) == value
