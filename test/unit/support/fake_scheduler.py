"""A stand-in for a scheduler; in a module of its own, so that a spawned process can import it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import setproctitle

# The first call finds the place of the title, as long as no test has moved the environment that lies behind it.
setproctitle.getproctitle()

READY = {"status": "ready", "max_total_num_tokens": 8192, "max_req_input_len": 8186}


def scheduler(title: str, behaviour: str, writer: Any) -> None:
    """Get ready, die or stay silent."""
    setproctitle.setproctitle(title)
    if behaviour == "ready":
        writer.send(READY | {"title": title})
    elif behaviour == "dies":
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(120)
