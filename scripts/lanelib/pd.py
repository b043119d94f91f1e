"""Prefill, decode and the router between them, on one machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from lanelib.errors import LaneError
from lanelib.lanes import Lane
from lanelib.machine import require_libraries
from lanelib.managed import (
    GRACE_S,
    READY_TIMEOUT_S,
    ManagedProcess,
    free_port,
    wait_all_ready,
)
from lanelib.servers import Server

TRANSFER_ENV = {
    # There is no RDMA device; the KV cache travels over TCP.
    "MC_FORCE_TCP": "1",
    # With one context-parallel rank it changes only this: later releases then do not stage what they
    # send in memory that a CUDA driver has pinned.
    "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER": "1",
}
#: Later releases keep retracted requests in memory that only a CUDA driver can pin.
RETRACTION_BACKUP = ("--disaggregation-decode-retraction-backup", "cpu_tensor")


class PDServers:
    """A prefill server, a decode server and a router, with the interface of one server.

    Attributes:
        prefill: computes the prompt's KV cache.
        decode: receives it and makes the tokens.
        router: what a client talks to.
    """

    def __init__(self, prefill: Server, decode: Server, router: ManagedProcess) -> None:
        self.prefill = prefill
        self.decode = decode
        self.router = router
        self.members: tuple[ManagedProcess, ...] = (prefill, decode, router)

    @classmethod
    def start(
        cls,
        lane: Lane,
        *,
        device: str = "cpu",
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        port: int | None = None,
    ) -> PDServers:
        """Start all three; `wait_ready` tells when they serve.

        Args:
            lane: which SGLang.
            device: ``cpu`` or ``cuda``; prefill and decode share the first GPU.
            extra_args: more arguments for prefill and decode.
            env: more environment for all three.
            host: the address to listen on.
            port: the router's port; a free one by default.

        Raises:
            LaneError: a system library is missing.
        """
        require_libraries()
        merged = TRANSFER_ENV | dict(env or {})
        bootstrap = str(free_port())
        transfer = ("--disaggregation-transfer-backend", "mooncake")
        backup = RETRACTION_BACKUP if lane.knows_option(RETRACTION_BACKUP[0]) else ()
        started: list[ManagedProcess] = []
        try:
            prefill = Server.start(
                lane,
                device=device,
                extra_args=(
                    *("--disaggregation-mode", "prefill", *transfer),
                    *("--disaggregation-bootstrap-port", bootstrap, *extra_args),
                ),
                env=merged,
                host=host,
                name=f"sglang-{lane.name}-prefill",
            )
            started.append(prefill)
            decode = Server.start(
                lane,
                device=device,
                extra_args=("--disaggregation-mode", "decode", *transfer, *backup, *extra_args),
                env=merged,
                host=host,
                name=f"sglang-{lane.name}-decode",
            )
            started.append(decode)
            port = port or free_port()
            router = ManagedProcess(
                f"sglang-{lane.name}-router",
                [
                    *(lane.python, "-m", "sglang_router.launch_router"),
                    *("--pd-disaggregation", "--mini-lb"),
                    *("--prefill", prefill.url, bootstrap, "--decode", decode.url),
                    *("--host", host, "--port", str(port)),
                ],
                env=lane.serve_env() | merged,
                host=host,
                port=port,
            )
        except BaseException:
            for member in started:
                member.stop()
            raise
        return cls(prefill, decode, router)

    @property
    def url(self) -> str:
        """Where the router answers."""
        return self.router.url

    @property
    def port(self) -> int:
        """The router's port."""
        return self.router.port

    @property
    def ready_s(self) -> float | None:
        """Seconds from the start to the last one's first answer; None before."""
        times = [member.ready_s for member in self.members]
        return max(t for t in times if t is not None) if all(times) else None

    def __enter__(self) -> PDServers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until all three answer.

        Raises:
            LaneError: one ended, or did not answer within `timeout_s` seconds in all.
        """
        wait_all_ready(self.members, timeout_s)

    def generate(self, prompt: str = "Hello", **options: Any) -> dict[str, Any]:
        """Ask the router; see `ManagedProcess.generate`."""
        return self.router.generate(prompt, **options)

    def processes(self) -> list[tuple[int, str]]:
        """Return (pid, title) of each living process of all three."""
        return [entry for member in self.members for entry in member.processes()]

    def stop(self, grace_s: float = GRACE_S) -> None:
        """End every process of all three, and wait until they are gone.

        Raises:
            LaneError: a process could not be killed.
        """
        for member in self.members:
            member.terminate()
        errors = []
        for member in self.members:
            try:
                member.stop(grace_s)
            except LaneError as error:
                errors.append(error)
        if errors:
            raise errors[0]
