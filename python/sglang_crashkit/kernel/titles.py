"""Read the role and the rank of a process of the server from its title.

SGLang sets the titles of its processes with setproctitle: ``sglang::scheduler`` followed by ``_DP0``, ``_PP0``,
``_ATTN_CP0``, ``_MOE_DP0``, ``_TP0``, ``_EP0``. Each rank is in the title only if that kind of parallelism is used; the
order of the ranks differs between releases.
"""

from __future__ import annotations

import re

PREFIX = "sglang::"
_RANK = re.compile(r"_(ATTN_CP|MOE_DP|DP|PP|TP|EP)(\d{1,6})(?=_|$)")
#: What follows the prefix in titles; a name comes before its own prefixes.
_ROLES = (
    *("scheduler", "detokenizer_router", "detokenizer", "data_parallel_controller"),
    *("tokenizer_worker", "crash_handler", "encoder"),
)

#: The roles besides schedulers without which no request is answered; compilers and other helpers come and go.
NEEDED = frozenset(
    {"server", "detokenizer", "detokenizer_router", "data_parallel_controller", "tokenizer_worker", "encoder"}
)


def role_of(title: str, *, is_root: bool = False) -> str:
    """Return the role of a process; `is_root` is for the process that launched the server.

    Returns:
        ``server`` for the root, the part after ``sglang::`` for SGLang's own workers, ``starting`` for a child of
        multiprocessing that has not set its title yet, ``helper`` for any other process (compilers, multiprocessing's
        resource tracker).
    """
    if is_root:
        return "server"
    if title.endswith(" -c multiprocessing.spawn"):
        return "starting"
    if not title.startswith(PREFIX):
        return "helper"
    name = title[len(PREFIX) :]
    known = next((role for role in _ROLES if name.startswith(role)), "")
    return known or name.split(":")[0].split(" ")[0] or "helper"


def rank_of(title: str) -> dict[str, int]:
    """Return the ranks in a scheduler's or an encoder's title by lower-case name, such as ``{"dp": 0, "tp": 1}``."""
    if not title.startswith((f"{PREFIX}scheduler", f"{PREFIX}encoder")):
        return {}
    return {name.lower(): int(number) for name, number in _RANK.findall(title)}


def label_of(title: str, pid: int) -> str:
    """Return a label that is safe in a file name, such as ``scheduler_TP0-4711``."""
    name = title.removeprefix(PREFIX)
    return f"{re.sub(r'[^A-Za-z0-9_.]+', '_', name)[:60].strip('_') or 'process'}-{pid}"
