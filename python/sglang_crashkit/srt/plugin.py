"""Entry point of SGLang's plugins, from 0.5.11 on: says at the launch that an installed kit is not applied.

Upstream calls it in every process of a server. A patched SGLang needs it for nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os

from sglang_crashkit.settings import Settings

logger = logging.getLogger(__name__)

#: Set by the first process that said so, for its children.
_SAID = "SGLANG_CRASHKIT_NOT_APPLIED"


def say_if_not_applied() -> None:
    """Warn once a server where the installed SGLang does not call the kit: ``pip install`` gave its files back."""
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
