"""The state file in SGLang's dist-info folder: what was patched, and how far a change has come.

It is written before the first file changes, with the phase `APPLYING` or `REVERTING`, and last of
all with `APPLIED`; `revert` ends by removing it. So a change that was cut off leaves a phase that
says so. Beside it lie the pristine files. RECORD lists both, so that ``pip uninstall sglang``
takes them along.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sglang_crashkit.errors import RefusedError

#: In the dist-info folder.
STATE_NAME = "sglang-crashkit.json"
#: In the dist-info folder: the pristine files, in the package's own layout.
BACKUP_FOLDER = "sglang-crashkit-pristine"

APPLYING, APPLIED, REVERTING = "applying", "applied", "reverting"
#: Who patched: the command, or the build of a patched wheel.
BY_COMMAND, BY_WHEEL = "apply", "wheel"

_SCHEMA_VERSION = 1


@dataclass(frozen=True)
class PatchedFile:
    """One file of the package."""

    #: sha256 of upstream's bytes, None where upstream has no such file.
    pristine: str | None
    #: sha256 once the phase is `APPLIED`, None where the file goes.
    patched: str | None
    #: sha256 that an earlier kit gave it, while this one's is still being put in its place.
    was: str | None = None


@dataclass(frozen=True)
class State:
    """The content of the state file."""

    phase: str
    by: str
    kit_version: str
    release: str
    #: Path below the package → what becomes of it.
    files: dict[str, PatchedFile]
    #: Path in RECORD → its row before the kit, None where it had none.
    record_rows: dict[str, str | None]
    #: Folders that were made for new files, below the package, outermost first.
    folders: tuple[str, ...] = ()

    def dump(self) -> bytes:
        """Return it as a file's bytes."""
        document = {
            "schema_version": _SCHEMA_VERSION,
            "phase": self.phase,
            "by": self.by,
            "kit_version": self.kit_version,
            "release": self.release,
            "files": {
                path: {"pristine": file.pristine, "patched": file.patched, "was": file.was}
                for path, file in sorted(self.files.items())
            },
            "record_rows": dict(sorted(self.record_rows.items())),
            "folders": list(self.folders),
        }
        return (json.dumps(document, indent=1) + "\n").encode()


def load_state(dist_info: Path, *, reinstall: str) -> State | None:
    """Read the state file in `dist_info`, None if there is none.

    Args:
        dist_info: SGLang's dist-info folder.
        reinstall: the command that puts upstream's files back, for the error.

    Raises:
        RefusedError: it does not read as one.
    """
    file = dist_info / STATE_NAME
    try:
        document = json.loads(file.read_bytes())
        if document["schema_version"] != _SCHEMA_VERSION:
            raise RefusedError(
                f"{file} has schema version {document['schema_version']}, which this kit does "
                "not know: a newer kit patched this SGLang",
                next_step="revert with that kit, or " + reinstall,
            )
        return State(
            phase=document["phase"],
            by=document["by"],
            kit_version=document["kit_version"],
            release=document["release"],
            files={path: PatchedFile(**fields) for path, fields in document["files"].items()},
            record_rows=dict(document["record_rows"]),
            folders=tuple(document["folders"]),
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RefusedError(f"{file} does not read as the kit's state: {error!r}", next_step=reinstall) from error
