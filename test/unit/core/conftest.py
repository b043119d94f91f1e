from __future__ import annotations

from unit.targets import runtime  # noqa: F401 - a fixture
