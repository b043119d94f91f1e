"""Remove keys, passwords and prompts from evidence before it is written.

A secret is recognized by its form (a token with a prefix that names its kind, the user before the host of an address),
by the name beside it (an option, a variable, a field, a header), or by its value, if that was seen beside such a name.
Text that only looks random stays, because ids of requests, commits and files look random. Upstream's marker replaces
the removed text. All patterns take linear time.

It is applied where text leaves a process of the server (`srt.redaction`), and where a file is written into an incident
(`incident.folder`) or a collection.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

REDACTED = "<redacted>"

#: Shorter values, in characters, are not looked for in texts: they may easily be part of an ordinary word.
_MIN_VALUE = 6
#: A run of this many characters that a text shares with a prompt counts as part of the prompt.
_RUN = 24
_MAX_PROMPTS, _MAX_PROMPT_CHARS = 64, 4096
#: Lists and objects of JSON that are nested deeper are redacted.
_MAX_DEPTH = 100

_WORD_BREAK = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")
_ALWAYS = frozenset(
    (
        *("authorization", "cookie", "credential", "credentials"),
        *("passphrase", "passwd", "password", "passwords", "secret", "secrets"),
    )
)
#: Last words of a secret's name; those in `_SELDOM` only if another word precedes them.
_LAST = frozenset({"apikey", "apikeys", "key", "token"})
_SELDOM = frozenset({"auth", "pwd"})
#: As a complete name, these usually mean any key, and a token of a text.
_AMBIGUOUS = frozenset({"key", "token"})
_OF_KEYS = frozenset({"access", "api", "private", "secret"})
#: The words before "key" or "token" in names that are no secrets: tokens of a model, keys of tables.
_HARMLESS = frozenset(
    (
        *("bos", "cached", "cls", "eos", "first", "image", "audio", "video", "inter", "last", "mask", "new", "next"),
        *("output", "pad", "per", "prompt", "sep", "special", "stop", "unk"),
        *("cache", "dict", "extra", "group", "hash", "lora", "node", "page", "pair", "primary", "public", "routing"),
        *("sort", "store", "transfer"),
    )
)

#: The forms of secrets: a string that each match contains, the pattern, and its replacement.
FORMS: tuple[tuple[str, str, str], ...] = (
    ("PRIVATE KEY", r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY[\s\S]*?(?:-----END [A-Z ]{0,40}-----|\Z)", REDACTED),
    # The user ``git`` in addresses of Git is not a secret.
    ("@", r"(://)(?!git@)[^/\s\"'<>]{1,400}@", rf"\1{REDACTED}@"),
    ("=", r"([?&](?:X-\w{1,8}-)?(?:[Ss]ig|[Ss]ignature|[Kk]ey|[Tt]oken)=)[^&\s\"'<>]+", rf"\1{REDACTED}"),
    ("/services/", r"(hooks\.slack\.com/services/)[\w/]+", rf"\1{REDACTED}"),
    ("hf_", r"\bhf_[A-Za-z0-9]{20,}", REDACTED),
    ("sk-", r"(?<![\w-])sk-(?=[A-Za-z_-]{0,64}\d)[\w-]{20,}", REDACTED),
    ("k_", r"\b[rs]k_(?:live|test)_\w{10,}", REDACTED),
    ("gh", r"\bgh[oprsu]_[A-Za-z0-9]{20,}", REDACTED),
    ("github_pat_", r"\bgithub_pat_\w{20,}", REDACTED),
    ("glpat-", r"\bglpat-[\w-]{16,}", REDACTED),
    ("xox", r"\bxox[abeoprs]-[\w-]{10,}", REDACTED),
    ("IA", r"\bA(?:K|S)IA[A-Z0-9]{16}(?![a-z0-9])", REDACTED),
    ("AIza", r"\bAIza[\w-]{30,}", REDACTED),
    ("nvapi-", r"\bnvapi-[\w-]{20,}", REDACTED),
    ("npm_", r"\bnpm_[A-Za-z0-9]{30,}", REDACTED),
    ("pypi-", r"\bpypi-[\w-]{30,}", REDACTED),
    ("SG.", r"\bSG\.[\w-]{16,}\.[\w-]{16,}", REDACTED),
    ("eyJ", r"(?<![\w-])eyJ[\w-]{5,}\.[\w-]{3,}(?:\.[\w-]*)?", REDACTED),
    ("earer", r"\b([Bb]earer\s{1,4})(?=[^\s\d]{0,400}\d)[^\s\"',;]{8,}", rf"\1{REDACTED}"),
    ("Secret", r"\b(Secret(?:Str|Bytes)\(b?)(?:'[^'\n]*'?|\"[^\"\n]*\"?)", rf"\1'{REDACTED}'"),
    ("login", r"\b(login\s{1,4}\S{1,200}\s{1,4}password\s{1,4})\S+", rf"\1{REDACTED}"),
    ("-u", r"(?<!\S)((?:-u|--user|--proxy-user)[ =])[^\s:'\"]{1,200}:[^\s'\"]+", rf"\1{REDACTED}"),
)
_BASIC = re.compile(r"\b([Bb]asic\s{1,4})([A-Za-z0-9+/]{8,}={0,2})")
#: A name and a value in parentheses or brackets, such as a header as Python or JSON writes it.
_PAIR = re.compile(
    r"""([(\[]\s?b?\\{0,3}["'](?P<name>[A-Za-z_][\w.-]{0,100})\\{0,3}["'],\s{0,4})
        (?P<value>b?\\{0,3}(?P<sign>["'])(?:(?!(?P=sign))[^\n])*
          (?:(?<=\\)(?P=sign)(?!\s?[)\]])(?:(?!(?P=sign))[^\n])*){0,8}(?P=sign))(?=\s?[)\]])""",
    re.VERBOSE,
)
#: Options, and names of variables, whose value is the next item of a list in Python or JSON, or of YAML; each with
#: strings of which every match contains one.
_LISTED = tuple(
    (needles, re.compile(rf"(?P<head>{head}){value}", re.MULTILINE))
    for needles, head, value in (
        (
            ("'-", '"-'),
            r"""(?P<sign>["'])(?P<name>--?[A-Za-z][\w-]{0,100})(?P=sign),\s{0,4}["']""",
            r"""[^"'\n]+""",
        ),
        (
            ("- -", "- '-", '- "-'),
            r"""^[ \t]{0,40}- ["']?(?P<name>--?[A-Za-z][\w-]{0,100})["']?[ \t]{0,4}\n[ \t]{0,40}- """,
            r"[^\n]+",
        ),
        (
            ("value: ",),
            r"""\bname: {1,4}["']?(?P<name>[A-Za-z_]\w{0,100})["']?[ \t]{0,4}\n[ \t]{0,40}value: {1,4}""",
            r"[^\n]+",
        ),
    )
)
#: An option and the space or sign after it, or a field (quoted or not) and the sign after it.
_NAMED = re.compile(
    r"""(?<![\w.-])(?:(?P<option>--?[A-Za-z][\w-]{0,100})(?:=|[ \t]{1,4})
      |(?P<field>[A-Za-z_][\w.-]{0,100})(?P<quoted>\\{0,3}["']?)\s{0,4}(?:=>?|:|->)\s{0,4})""",
    re.VERBOSE,
)
#: A quoted text, which may be in the call of a constructor and have a quote in it as a shell escapes it; a list or an
#: object; or a text without spaces.
_VALUE = re.compile(
    r"""(?:(?:basic|bearer)\s{1,4})?
        (?:(?:\w{1,40}\(\s?)?b?(?P<quote>\\{0,3}(?P<sign>["'])).*?(?:(?<!\\)(?P=quote)(?:"'"'[^']*')*|\Z)
          |[\[{][^\]}]{0,2000}[\]}]?
          |(?:[^\s"'&\\]|\\(?!["'\\nrt]))+)""",
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
#: The values of a field that is not set, or is a truth value.
_NOTHING = frozenset({"", "None", "null", "True", "False", "true", "false"})
#: A number after "token" or "key", such as a count of tokens or the position of a key.
_COUNT = re.compile(r"\d{1,12}(?:\.\d{1,9})?")
#: Headers whose value, if it is not quoted, is the rest of the line.
_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie", "set-cookie"})
_LINE = re.compile(r"digest\s[^\n]+|[^\n\"'\\]+", re.IGNORECASE)
_NUMBERS = re.compile(r"(?<!\d)\d{1,20}(?:,\s?\d{1,20}){15,}")

#: Values that are secrets in this process; see `learn`.
learned: set[str] = set()


def learn(values: Iterable[str]) -> None:
    """Have `redact_text` remove these values everywhere from now on, except those that are too short."""
    learned.update(_telling(values))


def is_secret_name(name: str) -> bool:
    """Return whether `name` names a secret: ``api_key``, ``--hf-token``, ``secretAccessKey``, ``DB_PASSWORD``.

    A single digit or letter as the last word, as in ``watermark_key_b``, is ignored.
    """
    words = [word.lower() for word in _WORD_BREAK.split(name) if word]
    if words and len(words) > 1 and len(words[-1]) == 1:
        words.pop()
    if not words or not _ALWAYS.isdisjoint(words) or words[-1].endswith(("password", "passwd")):
        return bool(words)
    last, before = words[-1], words[-2:-1]
    if before and before[0] in _HARMLESS:
        return False
    if before and last == "pass" and name.isupper():
        return True
    return last in _LAST or bool(before and (last in _SELDOM or (last == "keys" and before[0] in _OF_KEYS)))


def secrets_of_arguments(arguments: Sequence[str]) -> set[str]:
    """Return the values of a command line's secret options that are long enough to be looked for in texts."""
    values = set()
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
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
    """Return `text`, such as a message, JSON or a command line, without secrets, and without `secrets` anywhere."""
    for value in sorted({*secrets, *learned}, key=len, reverse=True):
        text = text.replace(value, REDACTED)
    for needle, pattern, instead in FORMS:
        if needle in text:
            # Compiled only when needed: importing the hooks must be fast.
            text = re.sub(pattern, instead, text)
    if "asic" in text:
        text = _BASIC.sub(_without_credentials, text)
    text = _PAIR.sub(_without_second, text)
    for needles, listed in _LISTED:
        if any(needle in text for needle in needles):
            text = listed.sub(_without_next, text)
    parts, done = [], 0
    for match in _NAMED.finditer(text):
        # Skip a name that is part of a value that has just been removed.
        span = _span_of_value(text, match) if match.start() >= done else None
        if span is not None:
            parts += [text[done : span[0]], REDACTED]
            done = span[1]
    return "".join(parts) + text[done:]


def redact_command(words: Iterable[str], secrets: Iterable[str] = ()) -> str:
    """Return a command line, quoted for a shell, without secrets."""
    # Redact each word first: a quote in a secret is escaped for the shell, where a pattern would end the secret.
    return redact_text(shlex.join(redact_text(word, secrets) for word in words), secrets)


def _without_credentials(match: re.Match[str]) -> str:
    # "Basic authentication" in a sentence has no credentials.
    try:
        is_pair = b":" in base64.b64decode(match[2] + "=" * (-len(match[2]) % 4))
    except binascii.Error:
        is_pair = False
    return f"{match[1]}{REDACTED}" if is_pair else match[0]


def _without_next(match: re.Match[str]) -> str:
    return f"{match['head']}{REDACTED}" if is_secret_name(match["name"]) else match[0]


def _without_second(match: re.Match[str]) -> str:
    if not is_secret_name(match["name"]):
        return match[0]
    begin, sign = match["value"].find(match["sign"]), match["sign"]
    return f"{match[1]}{match['value'][:begin]}{sign}{REDACTED}{match['value'][:begin].lstrip('b')}{sign}"


def _span_of_value(text: str, match: re.Match[str]) -> tuple[int, int] | None:
    """Return the begin and end of the value for a match of `_NAMED`, without its quotes; None if it is not a secret."""
    name = match["option"] or match["field"]
    is_secret, name = is_secret_name(name), name.lower()
    found = _VALUE.match(text, match.end()) if is_secret or name == "auth" else None
    if found is None or found[0].startswith("--"):
        return None
    quote = found["quote"]
    # "key: value" in a sentence means any key. The name of a secret has more words.
    if match["option"] is None and (name in _AMBIGUOUS or (name == "auth" and not (quote and match["quoted"]))):
        return None
    if quote is None:
        if name in _HEADERS and (line := _LINE.match(text, match.end())):
            found = line
        # A sign that ends a list, a call or a sentence is not part of the value.
        value = found[0].rstrip(" ,;)]}.")
        if name.endswith(("key", "token")) and _COUNT.fullmatch(value):
            return None
        return (match.end(), match.end() + len(value)) if value not in _NOTHING else None
    begin = found.end("quote")
    return begin, found.end() - len(quote) if found[0][begin - found.start() :].endswith(quote) else found.end()


def redact_json(value: Any, *, is_users: bool = False) -> Any:
    """Return a JSON value without secrets, recognized by the names of fields and in every text, at any depth.

    Args:
        value: any value that `json.dumps` accepts.
        is_users: the value is a user's: fields with the names ``key`` and ``token`` are secrets, too.
    """
    # Searching all texts at once is a hundred times as fast, and most values have no secret.
    together = "\n".join(_texts_of(value))
    redact = redact_text if redact_text(together) != together else str
    return _without_secrets(value, is_users, redact, 0)


def _texts_of(value: Any) -> Iterator[str]:
    rest = [value]
    while rest:
        one = rest.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            rest += (*one, *one.values())
        elif isinstance(one, (list, tuple)):
            rest += one


def _without_secrets(value: Any, is_users: bool, redact: Callable[[str], str], depth: int) -> Any:
    if isinstance(value, str):
        return redact(value)
    if not isinstance(value, (dict, list, tuple)):
        return value
    if depth > _MAX_DEPTH:
        return REDACTED
    if isinstance(value, dict):
        return {
            redact(name) if isinstance(name, str) else name: REDACTED
            if _is_secret_field(name, one, is_users) or (name == "value" and _is_variable(value))
            else _without_secrets(one, is_users, redact, depth + 1)
            for name, one in value.items()
        }
    places = _secret_places(value, is_users)
    return [
        REDACTED if at in places else _without_secrets(one, is_users, redact, depth + 1) for at, one in enumerate(value)
    ]


def _is_secret_field(name: object, value: object, is_users: bool) -> bool:
    # A number, and a field that is not set, is not a secret.
    if not isinstance(name, str) or not value or isinstance(value, (bool, int, float)):
        return False
    return is_secret_name(name) and (is_users or name.lower() not in _AMBIGUOUS)


def _secret_places(value: Sequence[Any], is_users: bool) -> set[int]:
    """Return the indices of secrets in a list: after their name in a pair, such as a header, or after an option."""
    if len(value) == 2 and isinstance(value[1], str) and _is_secret_field(value[0], value[1], is_users):
        return {1}
    words = enumerate(itertools.pairwise(value), start=1)
    return {
        at
        for at, (one, after) in words
        if isinstance(one, str) and one[:1] == "-" and isinstance(after, str) and is_secret_name(one)
    }


def _is_variable(value: Mapping[str, Any]) -> bool:
    """Return whether an object is a secret environment variable in the form of Kubernetes."""
    name = value.get("name")
    return isinstance(name, str) and isinstance(value.get("value"), str) and is_secret_name(name)


def redact_prompts(text: str, prompts: Iterable[str]) -> str:
    """Return `text` without the parts that it shares with `prompts`, and without long lists of numbers, such as tokens.

    The first 4,096 characters of at most 64 prompts are compared, because this runs in a process that crashes.
    """
    prompts = [prompt[:_MAX_PROMPT_CHARS] for prompt, _ in zip(prompts, range(_MAX_PROMPTS), strict=False)]
    # A message contains a prompt as it is, or as `repr` writes it.
    text = redact_shared(text, [form for prompt in prompts for form in (prompt, repr(prompt)[1:-1])])
    return _NUMBERS.sub(lambda match: f"<{match[0].count(',') + 1} numbers>", text)


def redact_shared(text: str, prompts: Sequence[str]) -> str:
    """Return `text` without runs of 24 characters that it shares with any of `prompts`, and without shorter prompts."""
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
    parts, done = [], 0
    for match in re.finditer(b"\1+", hidden):
        parts += [text[done : match.start()], REDACTED]
        done = match.end()
    return "".join(parts) + text[done:]
