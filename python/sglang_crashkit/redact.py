"""Take keys, passwords and prompts out of what is written as evidence.

A secret is known by the name that it stands beside (an option, a variable, a field, a header) or by its value, once
that was seen beside such a name. Upstream's word for what was taken out is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

REDACTED = "<redacted>"

#: Values shorter than this are too likely part of an ordinary word to be looked for in texts.
_MIN_VALUE = 6
#: A run of this many characters that a text shares with a prompt is taken for the prompt's.
_RUN = 24
_MAX_PROMPTS, _MAX_PROMPT_CHARS = 64, 4096

_WORD_BREAK = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")
_ALWAYS = frozenset({"authorization", "credential", "credentials", "passphrase", "passwd", "password", "secret"})
_LAST = frozenset({"apikey", "key", "token"})
#: Fields of upstream's that end like a secret and are none.
_HARMLESS = ("first_token", "routing_key", "extra_key", "pair_key")

_USER_INFO = re.compile(r"(://)[^/\s:@]{0,200}:[^/\s@]{1,200}@")
#: In a sentence of any kind: "Bearer token missing" holds no token.
_BEARER = re.compile(r"\b(Bearer\s+)(?=\S*\d)[^\s\"',;]{8,}", re.IGNORECASE)
#: An option and the space or sign behind it, or a field (quoted or not) and the sign behind it.
_NAMED = re.compile(
    r"""(?<![\w.-])(?:(?P<option>--?[A-Za-z][\w-]{0,100})(?:=|[ ]{1,4})
      |(?P<field>[A-Za-z][\w.-]{0,100})\\{0,3}["']?\s{0,4}[:=]\s{0,4})""",
    re.VERBOSE,
)
_VALUE = re.compile(
    r"""(?:(?:basic|bearer)\s+)?
        (?:(?P<quote>\\{0,3}(?P<sign>["'])).*?(?:(?P=quote)|\Z)|[^\s,;&"'}\])\\]+)""",
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
_NUMBERS = re.compile(r"\d+(?:,\s?\d+){15,}")


def is_secret_name(name: str) -> bool:
    """Say whether what is called `name` is a secret: ``api_key``, ``--hf-token``, ``secretAccessKey``, ``DB_PASSWORD``.

    A number or a single letter behind the name, as in ``watermark_key_b``, does not matter.
    """
    words = [word.lower() for word in _WORD_BREAK.split(name) if word]
    if words and len(words) > 1 and len(words[-1]) == 1:
        words.pop()
    if not words or "_".join(words[-2:]) in _HARMLESS:
        return False
    return words[-1] in _LAST or not _ALWAYS.isdisjoint(words)


def secrets_of_arguments(arguments: Sequence[str]) -> set[str]:
    """Return the values of a command line's secret options that are long enough to be looked for in texts."""
    values = set()
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = argument.partition("=")
        if argument.startswith("-") and is_secret_name(name):
            values.add(value if equals else following)
    return _telling(values)


def secrets_of_mapping(mapping: Mapping[str, object]) -> set[str]:
    """Return the values under secret names that are long enough to be looked for in texts."""
    return _telling(value for name, value in mapping.items() if is_secret_name(name) and isinstance(value, str))


def _telling(values: Iterable[str]) -> set[str]:
    return {value for value in values if len(value) >= _MIN_VALUE and not value.startswith("--")}


def redact_text(text: str, secrets: Iterable[str] = ()) -> str:
    """Return `text`, such as a message, JSON or a command line, without secrets; `secrets` wherever they stand."""
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, REDACTED)
    text = _BEARER.sub(rf"\1{REDACTED}", _USER_INFO.sub(rf"\1{REDACTED}@", text))
    parts, done = [], 0
    for match in _NAMED.finditer(text):
        # One whose own value has just been taken out is passed over.
        found = _VALUE.match(text, match.end()) if match.start() >= done and _names_secret(match) else None
        if found is not None and not found[0].startswith("--"):
            quote = found["quote"] or ""
            parts += [text[done : found.start()], f"{quote}{REDACTED}{quote}"]
            done = found.end()
    return "".join(parts) + text[done:]


def _names_secret(match: re.Match[str]) -> bool:
    name = match["option"] or match["field"]
    # In a sentence "key: value" speaks of any key; as the name of a secret it has more words.
    return is_secret_name(name) and (match["option"] is not None or name.lower() not in _LAST)


def redact_prompts(text: str, prompts: Iterable[str]) -> str:
    """Return `text` without what it shares with any of `prompts`, and without long lists of numbers, such as tokens.

    Of each prompt the first 4,096 characters are compared, of at most 64 prompts: this runs in a process that crashes.
    """
    prompts = [prompt[:_MAX_PROMPT_CHARS] for prompt, _ in zip(prompts, range(_MAX_PROMPTS), strict=False)]
    # In a message a prompt stands as it is or as Python writes it.
    text = redact_shared(text, [form for prompt in prompts for form in (prompt, repr(prompt)[1:-1])])
    return _NUMBERS.sub(lambda match: f"<{match[0].count(',') + 1} numbers>", text)


def redact_shared(text: str, prompts: Sequence[str]) -> str:
    """Return `text` without the runs of 24 characters that it shares with any of `prompts`, and the shorter ones."""
    for prompt in prompts:
        if _MIN_VALUE <= len(prompt) < _RUN:
            text = text.replace(prompt, REDACTED)
    places: dict[str, list[int]] = {}
    for start in range(len(text) - _RUN + 1):
        places.setdefault(text[start : start + _RUN], []).append(start)
    hidden = bytearray(len(text))
    for prompt in prompts:
        for start in range(len(prompt) - _RUN + 1):
            for place in places.pop(prompt[start : start + _RUN], ()):
                hidden[place : place + _RUN] = b"\1" * _RUN
    return _without(text, hidden)


def _without(text: str, hidden: bytearray) -> str:
    """Return `text` without the characters at whose places there is a 1."""
    parts, done = [], 0
    for match in re.finditer(b"\1+", hidden):
        parts += [text[done : match.start()], REDACTED]
        done = match.end()
    return "".join(parts) + text[done:]
