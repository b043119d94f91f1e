from __future__ import annotations

import os

from sglang_crashkit.doctor.drill_server import wait_for_the_others


def test_a_rank_waits_until_there_are_no_others() -> None:
    theirs, ours = os.pipe()
    os.close(ours)
    wait_for_the_others(theirs)
    os.close(theirs)
