"""Send one request to a web hook: ``python -m sglang_crashkit.notifications.post``, body on standard input.

The URL and what signs the body come in the environment, which other users cannot read. It prints the status of the
answer, or why there is none. Whoever runs it ends it where it takes too long.
"""

from __future__ import annotations

import os
import sys
import time
import urllib.error
import urllib.request
from email.message import Message
from http.client import HTTPException
from typing import IO

from sglang_crashkit import __version__
from sglang_crashkit.notifications.messages import signature_of
from sglang_crashkit.notifications.plan import SECRET, WEBHOOK


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """What is told of an incident goes where the user said, and nowhere else."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        """Follow none."""


def main() -> int:
    """Send it, and print one line."""
    body = sys.stdin.buffer.read()
    headers = {"Content-Type": "application/json", "User-Agent": f"sglang-crashkit/{__version__}"}
    if secret := os.environ.get(SECRET, ""):
        timestamp = str(int(time.time()))
        headers["X-Crashkit-Timestamp"] = timestamp
        headers["X-Crashkit-Signature"] = f"sha256={signature_of(secret, timestamp, body)}"
    # The scheme was looked at by `plan`.
    request = urllib.request.Request(os.environ[WEBHOOK], data=body, headers=headers)  # noqa: S310
    try:
        with urllib.request.build_opener(_NoRedirect).open(request) as answer:
            print(answer.status)  # noqa: T201 - what it was asked for
    except urllib.error.HTTPError as error:
        print(error.code)  # noqa: T201
        error.close()
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        print(f"{type(reason).__name__}: {reason}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
