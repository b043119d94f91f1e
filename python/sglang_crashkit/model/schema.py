"""The JSON Schema of ``incident.json``, made from the Structs of `model.incident` and the comments on their fields."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

import msgspec

from sglang_crashkit.model import SCHEMA_VERSION, incident, peers, step, verdict

#: A line with a field of a class, and the comment at its end.
_FIELD = re.compile(r"    (\w{1,80}): [^#]{1,200}(?:# (.*))?")
_REF = re.compile(r'"#/\$defs/(\w+)"')
_WORDS = (
    "A newer kit of the same schema_version may add fields and words. Times are UTC in ISO 8601, durations seconds."
)


def incident_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12), which fits what this kit and older ones of the same version write."""
    whole = msgspec.json.schema(incident.Incident, schema_hook=_entry)
    definitions: dict[str, Any] = whole["$defs"]
    for name in incident.NOT_IN_JSON:
        del definitions["ProcessReport"]["properties"][name]
    for name in incident.NOT_IN_JSON_OF_STEPS:
        del definitions["LastSteps"]["properties"][name]
    for name, definition in definitions.items():
        kind = next((vars(one)[name] for one in (incident, peers, step, verdict) if name in vars(one)), None)
        said = dict(_comments(kind)) if kind is not None else {}
        for field, told in definition.get("properties", {}).items():
            _allow_more_words(told)
            if field in said:
                # A reference stands alone.
                definition["properties"][field] = {"description": said[field], **told}
    document = definitions.pop("Incident")
    document["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    document["required"].append("schema_version")
    known, found = set[str](), {*_REF.findall(json.dumps(document))}
    while found - known:
        known |= found
        found = {*_REF.findall(json.dumps([definitions[name] for name in known]))}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:sglang-crashkit:incident:{SCHEMA_VERSION}",
        "$comment": _WORDS,
        **document,
        "$defs": {name: definitions[name] for name in sorted(known)},
    }


def _entry(kind: type) -> dict[str, Any]:
    """Return the schema of an event of the timeline."""
    if kind is not incident.Entry:
        raise NotImplementedError
    texts = {name: {"type": "string"} for name in ("time", "event")}
    return {"type": "object", "description": inspect.getdoc(kind), "required": list(texts), "properties": texts}


def _comments(kind: type) -> list[tuple[str, str]]:
    """Return the fields of a class with their comments: lines above that begin with ``#:``, or the end of the line."""
    above, found = list[str](), []
    for line in inspect.getsource(kind).splitlines():
        if line.startswith("    #: "):
            above.append(line[7:])
        elif field := _FIELD.fullmatch(line):
            words = " ".join(above) or field[2] or ""
            found += [(field[1], words.replace("``", "`"))] if words else []
            above = []
    return found


def _allow_more_words(told: dict[str, Any]) -> None:
    """Turn enums into strings with examples, at any depth, as newer kits may add words."""
    if "enum" in told:
        told["type"], told["examples"] = "string", told.pop("enum")
    for part in (*told.get("anyOf", ()), told.get("items"), told.get("additionalProperties")):
        if isinstance(part, dict):
            _allow_more_words(part)
