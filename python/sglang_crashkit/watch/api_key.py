"""Read the API key of a server from a file: on a command line every user of the machine sees it."""

from __future__ import annotations

from pathlib import Path

from sglang_crashkit.errors import UsageError

_MOST_BYTES = 4096


def read_api_key(path: Path) -> str:
    """Return the key that is the only line of the file, which may be a pipe.

    Raises:
        UsageError: the file cannot be read or holds no such line. What it holds is not shown.
    """
    hint = "put nothing but the key into it"
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}", next_step="name another file") from None
    try:
        key = content.decode("ascii").strip()
    except UnicodeDecodeError:
        raise UsageError(f"{path} holds no API key: it is not ASCII", next_step=hint) from None
    if not key or len(content) > _MOST_BYTES or not key.isprintable():
        raise UsageError(f"{path} holds no API key of one line and at most {_MOST_BYTES} bytes", next_step=hint)
    return key
