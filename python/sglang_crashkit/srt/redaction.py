"""Remove secrets from messages to the crash handler and from the dump of the requests.

The process itself knows its secrets best: from its arguments and environment variables, and from the fields of
SGLang's configuration.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import force_setattr

from sglang_crashkit.redact import (
    REDACTED,
    is_secret_name,
    redact_prompts,
    redact_text,
    secrets_of_arguments,
    secrets_of_mapping,
)

logger = logging.getLogger(__name__)

_WITHHELD = "<withheld: it could not be searched for secrets>"
#: The maximum nesting depth of the data in a dump besides the requests; deeper values are left out.
_MAX_DEPTH = 12
_REQUESTS = "requests"


def redact(text: str, *configurations: object, prompts: Iterable[str] = ()) -> str:
    """Return `text` without the secrets of this process and of `configurations`, and without users' `prompts`."""
    try:
        return redact_prompts(redact_text(text, known_secrets(*configurations)), prompts)
    except Exception:
        logger.warning("crash kit: a message could not be searched for secrets", exc_info=True)
        return _WITHHELD


def known_secrets(*configurations: object) -> set[str]:
    """Return the values of the secrets that this process knows, and of those in `configurations`; see `redact`."""
    secrets = secrets_of_arguments(sys.argv) | secrets_of_mapping(os.environ)
    return secrets.union(*(secrets_of_mapping(fields_of(each)) for each in configurations))


def redacted_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration without secrets, also without those in nested values."""
    redacted: dict[str, Any] = _without(dict(fields), known_secrets() | _collect(fields))
    return redacted


def redact_dump(data: dict[str, Any]) -> None:
    """Remove the secrets from the data that upstream is about to dump, in place; the requests stay as they are.

    The configuration's objects are replaced by changed copies, because the server may go on and use them.
    """
    rest = {name: value for name, value in data.items() if name != _REQUESTS}
    try:
        data |= redacted_fields(rest)
    except Exception:
        logger.warning("crash kit: the configuration is left out of the dump", exc_info=True)
        data |= dict.fromkeys(rest)


def _without(value: Any, secrets: set[str], depth: int = 0) -> Any:
    if isinstance(value, str):
        return redact_text(value, secrets)
    if type(value) is bytes:
        return redact_text(value.decode("latin-1"), secrets).encode("latin-1")
    if depth > _MAX_DEPTH:
        return None
    if type(value) is dict:
        return {name: _of_field(name, item, secrets, depth) for name, item in value.items()}
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_without(item, secrets, depth + 1) for item in value)
    if not _is_record(value):
        return value
    copied = copy.copy(value)
    if copied is value:
        # The class has a single instance, which the server uses.
        return None
    # A configuration may be frozen.
    change = force_setattr if isinstance(value, msgspec.Struct) else object.__setattr__
    for name, item in fields_of(value).items():
        change(copied, name, _of_field(name, item, secrets, depth + 1))
    return copied


def _of_field(name: object, value: Any, secrets: set[str], depth: int) -> Any:
    if isinstance(name, str) and is_secret_name(name) and value:
        if isinstance(value, (str, bytes)):
            return REDACTED
        if type(value) in (list, tuple, set, frozenset):
            return type(value)([REDACTED if isinstance(one, (str, bytes)) else one for one in value])
    return _without(value, secrets, depth + 1)


def _collect(value: Any, depth: int = 0) -> set[str]:
    """Return the secrets in a configuration by the names of its fields."""
    if depth > _MAX_DEPTH or isinstance(value, (str, bytes)):
        return set()
    if _is_record(value):
        return _collect(fields_of(value), depth + 1)
    items: Iterable[Any] = ()
    secrets: set[str] = set()
    if isinstance(value, Mapping):
        secrets = secrets_of_mapping({name: item for name, item in value.items() if isinstance(name, str)})
        items = value.values()
    elif isinstance(value, (Sequence, set, frozenset)):
        items = value
    return secrets.union(*(_collect(item, depth + 1) for item in items))


def _is_record(value: Any) -> bool:
    kind = type(value)
    is_class = isinstance(value, type)
    return not is_class and (hasattr(kind, "__dataclass_fields__") or hasattr(kind, "__struct_fields__"))


def fields_of(value: object) -> dict[str, Any]:
    """Return the fields of a configuration by name."""
    own = getattr(value, "__dict__", {})
    names = [*getattr(type(value), "__struct_fields__", ()), *own]
    if dataclasses.is_dataclass(value):
        names += [field.name for field in dataclasses.fields(value)]
    fields = {}
    for name in names:
        try:
            fields[name] = getattr(value, name, None)
        except Exception:  # noqa: BLE001 - transformers' configurations raise for fields that differ between layers
            fields[name] = own.get(name)
    return fields
