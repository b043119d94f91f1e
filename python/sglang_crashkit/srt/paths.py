"""Paths of source files as a person reads them."""

from __future__ import annotations

import sys


def shorten(filename: str) -> str:
    """Return the path relative to the longest folder of ``sys.path`` that holds it, as it is where none does."""
    # The longest entry: a checkout on the path may hold the environment that the module is installed in.
    roots = (root.rstrip("/") + "/" for root in sys.path if root)
    longest = max((root for root in roots if filename.startswith(root)), key=len, default="")
    return filename[len(longest) :]
