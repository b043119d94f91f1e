"""Send one request: ``python -m sglang_crashkit.notifications.post``, with its body on standard input.

The URL and what signs the body come in the environment, which other users cannot read. It prints the status of the
answer, or why there is none. Whoever runs it ends it where it takes too long.
"""

from __future__ import annotations

import argparse
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from email.message import Message
from http.client import HTTPException
from pathlib import Path
from typing import IO

from sglang_crashkit import __version__
from sglang_crashkit.notifications.messages import signature_of
from sglang_crashkit.notifications.plan import SECRET, WEBHOOK


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """What is sent of an incident goes where the user said, and nowhere else."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        """Follow none."""


def main() -> int:
    """Send it, and print one line."""
    parser = argparse.ArgumentParser(prog="sglang_crashkit.notifications.post")
    parser.add_argument("--token-file", type=Path)
    parser.add_argument("--ca-file", type=Path)
    args = parser.parse_args()
    body = sys.stdin.buffer.read()
    headers = {"Content-Type": "application/json", "User-Agent": f"sglang-crashkit/{__version__}"}
    if secret := os.environ.get(SECRET, ""):
        timestamp = str(int(time.time()))
        headers["X-Crashkit-Timestamp"] = timestamp
        headers["X-Crashkit-Signature"] = f"sha256={signature_of(secret, timestamp, body)}"
    # The scheme was looked at by `plan`.
    request = urllib.request.Request(os.environ[WEBHOOK], data=body, headers=headers)  # noqa: S310
    try:
        if args.token_file is not None:
            request.add_header("Authorization", f"Bearer {args.token_file.read_text().strip()}")
        context = ssl.create_default_context(cafile=args.ca_file)
        opener = urllib.request.build_opener(_NoRedirect, urllib.request.HTTPSHandler(context=context))
        with opener.open(request) as answer:
            print(answer.status)  # noqa: T201 - what it was asked for
    except urllib.error.HTTPError as error:
        print(error.code)  # noqa: T201
        error.close()
    except (HTTPException, ValueError) as error:
        # Their texts may hold the URL or a header, and so a key.
        print(type(error).__name__)  # noqa: T201
    except OSError as error:
        # That of an error of urllib is the error itself, or a text, as that of ssl is.
        reason = getattr(error, "reason", None)
        named = reason if isinstance(reason, BaseException) else error
        print(f"{type(named).__name__}: {named}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
