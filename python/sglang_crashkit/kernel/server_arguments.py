"""What a server's command line says of the server: with whom its processes meet, and which side of a pair it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

#: SGLang's names of the option, the older one last.
_RENDEZVOUS = ("--dist-init-addr", "--nccl-init-addr")
#: What a server listens on that names no port.
_DEFAULT_PORT = 30000


def rendezvous_of(arguments: Sequence[str]) -> str | None:
    """Return the address at which the processes of one server on all its hosts meet, None where none is named."""
    return value_of(arguments, *_RENDEZVOUS)


def side_of(arguments: Sequence[str]) -> Literal["prefill", "decode"] | None:
    """Return which side of a prefill and decode pair the server is, None otherwise."""
    value = value_of(arguments, "--disaggregation-mode")
    if value == "prefill":
        return "prefill"
    return "decode" if value == "decode" else None


def port_of(arguments: Sequence[str]) -> int:
    """Return the port on which the server answers HTTP; SGLang's own default where none is named."""
    value = value_of(arguments, "--port") or ""
    return int(value) if value.isascii() and value.isdigit() and int(value) < 1 << 16 else _DEFAULT_PORT


def value_of(arguments: Sequence[str], *names: str) -> str | None:
    """Return what a command line gives for the option that is called one of `names`; None where it gives nothing."""
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        name, equals, value = argument.partition("=")
        if name in names:
            return (value if equals else following) or None
    return None
