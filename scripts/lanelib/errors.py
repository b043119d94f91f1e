"""The one error of the lanes, and the frame that prints it for a script."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable


class LaneError(Exception):
    """Something is missing or failed; the message names it in a sentence, `next_step` the command that helps.

    A script ends with `exit_code`: 1 failed, 2 usage.
    """

    def __init__(self, message: str, *, next_step: str | None = None, exit_code: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step
        self.exit_code = exit_code

    def __str__(self) -> str:
        return self.message if self.next_step is None else f"{self.message}\n  next: {self.next_step}"


def run_script(name: str, main: Callable[[], int]) -> int:
    """Run `main` and turn a `LaneError`, Ctrl-C or SIGTERM into one message and an exit status."""
    # Or what was started, each in a session of its own, would be left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return main()
    except LaneError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
