"""Run the command line as ``python -m sglang_crashkit``."""

import sys

from sglang_crashkit.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
