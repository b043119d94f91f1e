"""Hook of ``sglang/srt/ray/scheduler_actor.py``: the start and the failure of a rank that is a Ray actor.

Ray's daemon starts the actor, with its own environment and outside the server's process tree. So the actor itself
reports which server it belongs to, and its title, because Ray names its process. On a node without the engine's crash
handler, an actor starts its own.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from sglang_crashkit import protocol
from sglang_crashkit.kernel.procfs import boot_id
from sglang_crashkit.settings import MODE_VARIABLE, SOCKET_VARIABLE, SPOOL_VARIABLE, Settings, published
from sglang_crashkit.srt.entrypoints.engine import on_engine_launch, on_ranks_ready
from sglang_crashkit.srt.hooks import Function, never_raises, notify
from sglang_crashkit.srt.managers.scheduler import on_scheduler_exception
from sglang_crashkit.srt.server_args import set_here

#: Attribute that the kit adds to an actor's ``PortArgs``: the engine's node, and variables of its environment.
_CARRIED = "crashkit"


@never_raises
def let_carry(_engine: type, _server_args: Any, port_args: Any, *_args: Any, **_kwargs: Any) -> None:
    """Make the handler known to actors, by these ``PortArgs`` and by all that this process makes from now on."""
    names = (SOCKET_VARIABLE, SPOOL_VARIABLE, MODE_VARIABLE)
    environ = set_here | {name: value for name in names if (value := published(name))}
    if not Settings.from_environ().enabled or SOCKET_VARIABLE not in environ:
        return
    kind, carried = type(port_args), (boot_id(), environ)
    setattr(port_args, _CARRIED, carried)
    # The data-parallel controller makes `PortArgs` for each rank. A class attribute would not be pickled.
    make = getattr(kind.init_new, "__wrapped__", kind.init_new)

    @functools.wraps(make)
    def init_new(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        setattr(made, _CARRIED, carried)
        return made

    kind.init_new = staticmethod(init_new)


def on_scheduler_actor(method: Function) -> Function:
    """Wrap ``SchedulerActor.__init__`` and ``run_event_loop``: report the exception that ends the actor."""

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Ray sends the class by value, maybe to a node without the kit: loading this function must not need the kit.
        try:
            from sglang_crashkit.srt.ray import scheduler_actor as kit
        except ImportError:
            return method(self, *args, **kwargs)
        return kit.run_method(method, self, *args, **kwargs)

    return wrapper


def run_method(method: Function, actor: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method of an actor, and report the exception that ends it."""
    is_start = method.__name__ == "__init__"
    if is_start:
        _join(**kwargs)
    try:
        result = method(actor, *args, **kwargs)
    except BaseException:
        on_scheduler_exception()
        raise
    if is_start:
        on_ranks_ready()
    return result


@never_raises
def _join(*, server_args: Any, port_args: Any, tp_rank: int = 0, **_others: Any) -> None:
    carried: tuple[str, dict[str, str]] | None = getattr(port_args, _CARRIED, None)
    if carried is None:
        return
    node, environ = carried
    if node == boot_id() and protocol.is_reachable(environ[SOCKET_VARIABLE]):
        os.environ.update(environ)
    else:
        on_engine_launch(server_args)
    # Preliminary: the handler reads the process's own title once this process has configured its logger.
    notify("member", title=f"sglang::scheduler_TP{tp_rank}")
