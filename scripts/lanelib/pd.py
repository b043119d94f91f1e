"""Prefill, decode and the router between them, on one machine."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from lanelib.commands import LaneError
from lanelib.lanes import Lane
from lanelib.servers import GRACE_S, ManagedProcess, Server, free_port

#: Shared libraries of the KV transfer engine, and the Debian package of each.
PD_LIBRARIES = {"libibverbs.so.1": "libibverbs1", "librdmacm.so.1": "librdmacm1"}
PD_LIBRARIES |= {"libnuma.so.1": "libnuma1", "liburing.so.2": "liburing2"}
#: libibverbs loads the last one at run time, so no soname shows whether it is installed.
PD_PACKAGES = [*PD_LIBRARIES.values(), "ibverbs-providers"]
TRANSFER_ENV = {
    # There is no RDMA device; the KV cache travels over TCP.
    "MC_FORCE_TCP": "1",
    # With one context-parallel rank, the only effect is that later releases do not stage the data that they
    # send in memory that a CUDA driver has pinned.
    "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER": "1",
}
#: Later releases keep retracted requests in memory that only a CUDA driver can pin.
RETRACTION_BACKUP = ("--disaggregation-decode-retraction-backup", "cpu_tensor")


def missing_libraries() -> list[str]:
    """Return the Debian packages whose library the dynamic loader does not find."""
    missing = []
    for soname, package in PD_LIBRARIES.items():
        try:
            ctypes.CDLL(soname)
        except OSError:
            missing.append(package)
    return missing


def require_libraries() -> None:
    """Check the libraries that prefill/decode disaggregation needs."""
    if missing := missing_libraries():
        raise LaneError(
            f"prefill/decode needs system libraries that are not installed: {', '.join(missing)}",
            next_step=f"apt-get install {' '.join(PD_PACKAGES)}",
        )


class PDServers(ManagedProcess):
    """The router, with the prefill and the decode server behind it, used like one server."""

    prefill: Server
    decode: Server
    router: PDServers

    @classmethod
    def start(
        cls,
        lane: Lane,
        *,
        device: str = "cpu",
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> PDServers:
        """Start all three; `wait_ready` waits until they serve. On a GPU machine, prefill and decode share one GPU.

        `extra_args` and `env` are for prefill and decode.
        """
        require_libraries()
        bootstrap = str(free_port())
        modes = {
            "prefill": ("--disaggregation-bootstrap-port", bootstrap),
            "decode": RETRACTION_BACKUP if lane.knows_option(RETRACTION_BACKUP[0]) else (),
        }
        with ExitStack() as started:
            behind = []
            for mode, options in modes.items():
                argv = ["--disaggregation-mode", mode, "--disaggregation-transfer-backend", "mooncake"]
                argv += [*options, *extra_args]
                name = f"sglang-{lane.name}-{mode}"
                environ = {**TRANSFER_ENV, **(env or {})}
                server = Server.start(lane, device=device, extra_args=argv, env=environ, name=name, spins=True)
                behind.append(started.enter_context(server))
            prefill, decode = behind
            port = port or free_port()
            router: list[str | Path] = [lane.python, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
            router += ["--mini-lb", "--prefill", prefill.url, bootstrap, "--decode", decode.url]
            router += ["--host", "127.0.0.1", "--port", str(port)]
            env = lane.serve_env() | TRANSFER_ENV
            pair = cls(f"sglang-{lane.name}-router", router, env=env, host="127.0.0.1", port=port)
            started.pop_all()
        pair.prefill, pair.decode, pair.router, pair.members = prefill, decode, pair, (prefill, decode, pair)
        return pair

    def processes(self) -> list[tuple[int, str]]:
        """Return (pid, title) of each living process of all three."""
        return [*self.prefill.processes(), *self.decode.processes(), *super().processes()]

    def stop(self, grace_s: float = GRACE_S) -> None:
        """End every process of all three, and wait until they are gone."""
        with ExitStack() as stack:
            # The stack ends each of the three even where ending another one fails.
            stack.callback(super().stop, grace_s)
            for member in (self.decode, self.prefill):
                stack.callback(member.stop, grace_s)
                member.terminate()
            self.terminate()
