"""Real SGLang environments and servers for the tests and the quickstart.

Only the standard library is imported here: this package runs before any virtual environment exists. Anything that is
missing or fails raises a `LaneError`.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - it meets whatever python3 is
    sys.exit(f"{sys.argv[0]} needs Python 3.10 or later; next: python3.11 {sys.argv[0]} ...")
