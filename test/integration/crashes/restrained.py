"""A command in front of a server's that takes root's rights from it, that to trace any process among them.

One process of a user may still trace another by the rules of the kernel, and read its memory in ``/proc`` even where a
seccomp filter denies it ptrace(2), unless that one is not dumpable; see prctl(2).
"""

from __future__ import annotations

import os
import shutil

NOBODY = 65534
#: What the server runs lies where only root may look.
_CAPABILITIES = "-all,+dac_override,+dac_read_search"
#: To be put in front of a command, so that it runs as `NOBODY`.
RESTRAIN = (
    "setpriv",
    f"--reuid={NOBODY}",
    f"--regid={NOBODY}",
    "--clear-groups",
    f"--inh-caps={_CAPABILITIES}",
    f"--ambient-caps={_CAPABILITIES}",
)


def can_restrain() -> bool:
    """Say whether this process may run a command so."""
    return os.geteuid() == 0 and shutil.which("setpriv") is not None
