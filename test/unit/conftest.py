from __future__ import annotations

from hypothesis import settings

from unit.support.targets import runtime  # noqa: F401 - a fixture

# The machine may be busy with other things, and nothing is to be left in the working folder.
settings.register_profile("unit", deadline=None, max_examples=60, database=None)
settings.load_profile("unit")
# scripts/test --fast asks for this one.
settings.register_profile("fast", parent=settings.get_profile("unit"), max_examples=15)
