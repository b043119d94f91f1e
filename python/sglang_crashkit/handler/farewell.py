"""The server's main process is about to end in good order, and with it maybe this process: what is left goes now.

Where the main process is process 1 of a container, or what it runs below ends with it, such as ``tini`` or a shell, the
kernel kills everything that is in the container at that moment.
"""

from __future__ import annotations

import logging

from sglang_crashkit.handler.current import CurrentIncident
from sglang_crashkit.handler.folders import Place
from sglang_crashkit.kernel.identity_key import own_namespace
from sglang_crashkit.protocol import WAIT_FIELD, Mailbox, Message

logger = logging.getLogger(__name__)

#: The PID namespace of the host has this inode in every kernel; include/linux/proc_ns.h.
_HOST_NAMESPACE = 0xEFFFFFFC
#: An incident that is written at once takes no longer, in seconds.
_WRITE_SECS = 5.0


class Farewell:
    """Answers the main process once nothing is left to do for its sake.

    Args:
        current: the incident at hand, which is finished before.
        mailbox: how it is answered.
        place: what is removed.
    """

    def __init__(self, current: CurrentIncident, mailbox: Mailbox, place: Place) -> None:
        self._current = current
        self._mailbox = mailbox
        self._place = place
        self._waiting: list[Message] = []

    def hear(self, message: Message) -> None:
        """Take in that the main process is about to end."""
        if self._current.is_open and own_namespace() == _HOST_NAMESPACE:
            # This process outlives it, and takes the time that the incident needs.
            self._mailbox.acknowledge(message, ack="at work")
            return
        if self._current.is_open:
            self._current.finish()
        self._waiting.append(message)
        if self._current.is_open:
            secs = (self._current.gpus.cores_secs_left or 0.0) + _WRITE_SECS
            self._mailbox.acknowledge(message, ack="wait", **{WAIT_FIELD: secs})

    def act_on_time(self) -> None:
        """Do what is due by now."""
        if self._current.is_open:
            return
        while self._waiting:
            message = self._waiting.pop()
            with self._mailbox.line_to(message) as answer:
                # From here on no other process of the server reaches this one; they are about to be killed.
                self._place.remove_own()
                answer(ack="clean")
                logger.info("the server ends in good order")
