"""Where one crash handler works on disk."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.incident.folder import IncidentFolder, NullFolder, new_id
from sglang_crashkit.protocol import Message
from sglang_crashkit.settings import DiskLimits, fallback_folder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where the handler works.

    Attributes:
        host_folder: the host's folder in the crash folder; incidents go below it.
        spool: where failing ranks leave their records.
        runtime: the folder of the socket, removed at the end.
    """

    host_folder: Path
    spool: Path
    runtime: Path

    def make_folder(self, kind: str, seconds: float, limits: DiskLimits) -> IncidentFolder:
        """Make an incident's folder, in another place where the crash folder cannot be used.

        Args:
            kind: see `IncidentRun`.
            seconds: when it happened, since the epoch.
            limits: what it may take of the disk.

        Returns:
            One that keeps nothing, and says why, where there is no place at all.
        """
        problems = []
        for folder in (self.host_folder, fallback_folder()):
            try:
                elsewhere = [other / "incidents" for other in self.earlier() if other != folder]
                return IncidentFolder(folder / "incidents", kind, new_id(), seconds, limits, elsewhere, self._server)
            except (OSError, CrashkitError) as error:
                problems.append(f"no incident can be written below {folder}: {error}")
                logger.error("%s", problems[-1])
        return NullFolder("; ".join(problems))

    @property
    def _server(self) -> int:
        """The server's pid, 0 where that is not known."""
        pid = self.runtime.name.partition("-")[0]
        return int(pid) if pid.isdecimal() else 0

    def earlier(self) -> list[Path]:
        """Return the folders in which an earlier server on this host may have left incidents.

        Where its crash folder could not be used when it began, that is the host's folder in the other place; where it
        could not be used when an incident began, that place itself.
        """
        fallback = fallback_folder()
        return list(dict.fromkeys([self.host_folder, fallback / self.host_folder.name, fallback]))

    def record_of(self, message: Message) -> Path | None:
        """Return the record that a failing rank says it left; None where it is none of the spool's."""
        record = message.fields.get("record")
        if not isinstance(record, str):
            return None
        path = Path(record)
        try:
            is_record = path.parent == self.spool and path.is_file() and not path.is_symlink()
        except OSError:
            return None
        return path if is_record else None

    def remove_own(self) -> None:
        """Remove what is this server's alone; a record that nobody took in stays."""
        shutil.rmtree(self.runtime, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.spool.rmdir()

    def clean_up(self, keys: Collection[str] = ()) -> None:
        """Remove what is of no use without the server; a record that nobody took in stays.

        Args:
            keys: the server's processes, see `identity_key`; a request dump that one of them could not finish is torn,
                and no pickle. The host's folder may be another server's, too, in which all pids may be the same.
        """
        self.remove_own()
        for torn in self.host_folder.glob(".crash_dump_*.partial"):
            if torn.name.split(".")[-2] in keys:
                with contextlib.suppress(OSError):
                    torn.unlink()
        for dump in (self.host_folder / "flight_recorder").glob("*-*-*-rank*"):
            # Nobody took it in, as one that came when the incident was finished.
            if dump.name.partition("-rank")[0] in keys:
                with contextlib.suppress(OSError):
                    dump.unlink()
