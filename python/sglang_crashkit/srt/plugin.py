"""Entry point for SGLang's plugins, from 0.5.11 on: warns at the launch if the installed kit is not applied.

Upstream calls it in every process of a server. A patched SGLang does not need it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os

from sglang_crashkit.settings import Settings

logger = logging.getLogger(__name__)

#: Set by the first process that warned, for its children.
_SAID = "SGLANG_CRASHKIT_NOT_APPLIED"


def say_if_not_applied() -> None:
    """Warn, once per server, if the installed SGLang does not call the kit: ``pip install`` restored its files."""
    with contextlib.suppress(Exception):
        if importlib.util.find_spec("sglang.srt.crashkit") is not None:
            return
        if _SAID in os.environ or not Settings.from_environ().enabled:
            return
        os.environ[_SAID] = "1"
        logger.warning(
            "crash kit: sglang-crashkit is installed, but this SGLang is not patched: a crash leaves no incident; "
            "next: sglang-crashkit apply"
        )
