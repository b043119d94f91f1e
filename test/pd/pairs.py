"""A real pair of a prefill and a decode server, with its router, until the end of a test."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from lanelib.lanes import Lane
from lanelib.pd import PD_PACKAGES, PDServers, missing_libraries

MISSING = missing_libraries()
#: For ``pytestmark``: what a pair needs.
NEEDED = pytest.mark.skipif(
    bool(MISSING), reason=f"{', '.join(MISSING)} missing; apt-get install {' '.join(PD_PACKAGES)}"
)


@contextmanager
def serving(
    lane: Lane, device: str, folder: Path, *options: str, env: Mapping[str, str] | None = None
) -> Iterator[PDServers]:
    """Run a pair whose incidents go to `folder`, and yield it once it has answered a request."""
    options = ("--crash-dump-folder", str(folder), *options)
    with PDServers.start(lane, device=device, extra_args=options, env=env) as pair:
        pair.wait_ready()
        pair.generate("Hello", max_new_tokens=4, timeout_s=120)
        yield pair
