"""Forms in which secrets stand in texts, and lines that look like them and hold none."""

from __future__ import annotations

from pathlib import Path

import yaml

_TEXTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
#: What is planted in each form: no part of it may stay.
PLANTED = "Zq7Wm3Xk9Rt2Vb5N"
FORMS: list[str] = [
    form.replace("{PLANTED}", PLANTED).replace("{PLANTED_UPPER}", PLANTED.upper()) for form in _TEXTS["forms"]
]
INNOCENT: list[str] = _TEXTS["innocent"]


def holds_secret(text: str) -> bool:
    """Say whether six characters of what is planted, or its credentials as base64, are in a text."""
    parts = (PLANTED[start : start + 6].lower() for start in range(len(PLANTED) - 5))
    return "dXNlcjpacTdX" in text or any(part in text.lower() for part in parts)
