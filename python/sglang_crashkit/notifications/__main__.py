"""``python -m sglang_crashkit.notifications INCIDENT``: started by the crash handler once the incident is whole."""

from __future__ import annotations

import sys
from pathlib import Path

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.notifications.sending import tell


def main() -> int:
    """Send the notices; what cannot be sent is said in the crash handler's log."""
    try:
        tell(Path(sys.argv[1]))
    except (OSError, CrashkitError) as error:
        sys.stderr.write(f"nobody was notified of {sys.argv[1]}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
