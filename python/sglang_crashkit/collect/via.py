"""Reach hosts through a command that a user names, such as ``kubectl exec {host} -c sglang --`` or ``ssh {host}``.

No shell runs here: the template is split into words as a shell would do, and ``{host}`` is replaced in each. What is to
be run there follows as further words, which kubectl and docker hand on as they are. Where the template says
``{command}``, it stands there instead, as one word that a shell on the other side takes apart. ssh joins its words with
blanks and has a shell take them apart, so that for ssh the command is always one such word. Where ssh is called by
another command, the template has to say ``{command}``.

Killing such a command does not end what it runs there: the collector ends by itself with its reader.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sglang_crashkit.collect.gather import Limits, NodeRun, Transport, run_on_nodes
from sglang_crashkit.errors import UsageError

_HOST, _COMMAND = "{host}", "{command}"
_EXAMPLE = 'such as --via "kubectl exec {host} -c sglang --" or --via "ssh {host}"'
#: A host's name is a folder's name here, and a shell on the other side may see it: no option, path or quote is one.
_NAME = re.compile(r"[\w\[][\w.:@%+\[\]-]{0,252}", re.ASCII)
#: What joins its words for a shell on the other side; the command is quoted for the first, where a template begins so.
_JOINING = ("ssh", "autossh", "gsissh", "rsh", "slogin")
_BY_HAND = "try it by hand: {look}"
#: What each command prints of itself, whatever comes of it.
_NOISE = re.compile(
    r"^Defaulted container|^Warning: Permanently added|^command terminated with exit code|^Connection to \S+ closed"
)
_MARKS = re.compile(r"^(?:error: |Error from server )")
#: As `gather.Transport.reasons` has them.
_REASONS = (
    (
        r"Host key verification failed|REMOTE HOST IDENTIFICATION",
        "its key is not known here, or another one: {said}",
        "log in once by hand to compare and keep its key, or write it into known_hosts",
    ),
    (
        r"[Pp]assword|passphrase|Permission denied \(|authentication fail",
        "it asks for a password, or takes no key: {said}",
        "use a key or an agent, for nobody answers a question (ssh -o BatchMode=yes): {look}",
    ),
    (
        r"NotFound|[Nn]o such container|[Cc]ontainer.* not found|is not running|is not valid for pod|"
        r"cannot exec into a container in a completed pod",
        "there is no such pod or container, or it does not run: {said}",
        _BY_HAND,
    ),
    (r"[Ff]orbidden|[Uu]nauthorized|must be logged in", "it may not be entered: {said}", _BY_HAND),
    (
        r"kex_exchange_identification|[Tt]oo many",
        "it turned the connection away: {said}",
        "ask fewer at a time, such as --fan-out 8",
    ),
    (
        r"resolve hostname|[Nn]ame or service not known|[Cc]onnection (?:refused|reset|closed)|[Tt]imed out|[Tt]imeout"
        r"|No route to host|Network is unreachable|[Uu]nable to connect|[Cc]annot connect|was refused|i/o timeout",
        "it cannot be reached: {said}",
        _BY_HAND,
    ),
)


def hosts_via(template: str, hosts: Sequence[str]) -> Transport:
    """Return the hosts, each once, to be reached by the command of which `template` is the pattern.

    Raises:
        UsageError: there is no such command here, it says nowhere which host, or a host's name is none.
    """
    words = words_of(template)
    if not hosts:
        raise UsageError("there is no host in the list", next_step="--hosts A,B, or --hosts-file FILE")
    for host in hosts:
        if not _NAME.fullmatch(host):
            raise UsageError(
                f"{host[:300]!r} is not the name of a host",
                next_step="use letters, digits and _ . : @ % + - [ ], and put what is alike in all names into --via",
            )
    nodes, program = tuple(dict.fromkeys(hosts)), Path(words[0]).name
    log = f"{program}.log"

    def run(
        commands: Mapping[str, Sequence[str]], on_end: Callable[[NodeRun], None], output: Path, limits: Limits
    ) -> KeyboardInterrupt | None:
        argvs = {host: command_on(words, host, command) for host, command in commands.items()}
        # Nobody sits there to answer what ssh would ask in a window.
        environ = {**os.environ, "SSH_ASKPASS_REQUIRE": "never"}
        return run_on_nodes(argvs, on_end, output=output, log=log, environ=environ, limits=limits)

    return Transport(
        nodes=nodes,
        noun="host",
        title=f"{len(nodes)} host{'' if len(nodes) == 1 else 's'} by {program}",
        # The words after the first may hold a secret.
        identity={"via": program},
        log=log,
        returns_files=True,
        reasons=_REASONS,
        noise=_NOISE,
        marks=_MARKS,
        look=lambda node: shlex.join(command_on(words, node, ["true"])),
        run=run,
    )


def command_on(template: Sequence[str], host: str, command: Sequence[str]) -> list[str]:
    """Return the arguments that run `command` on a host, by the words of a template."""
    words, quoted = [word.replace(_HOST, host) for word in template], shlex.join(command)
    if any(_COMMAND in word for word in words):
        return [word.replace(_COMMAND, quoted) for word in words]
    return [*words, quoted] if Path(words[0]).name == _JOINING[0] else [*words, *command]


def words_of(template: str) -> list[str]:
    """Return the words of a template; see `hosts_via`.

    Raises:
        UsageError: there is no such command here, or it says nowhere which host.
    """
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise UsageError(f"--via {template}: {error}", next_step=f"name a command, {_EXAMPLE}") from None
    if not any(_HOST in word for word in words[1:]):
        raise UsageError(
            f"--via {template!r} does not say where the host's name goes", next_step=f"put {{host}} there, {_EXAMPLE}"
        )
    if joining := _find_joining(words):
        raise UsageError(
            f"--via {template!r}: {joining} has a shell take the command apart, so say where it goes",
            next_step=f"--via {shlex.quote(f'{template} {_COMMAND}')}",
        )
    if shutil.which(words[0]) is None:
        raise UsageError(f"--via: there is no command {words[0]} here", next_step="name its path, or set PATH")
    if Path(words[0]).name == _JOINING[0]:
        # Nobody answers a question, and an empty password is a failed log-in. The first word on an option holds.
        words[1:1] = ["-o", "BatchMode=yes"]
    return words


def _find_joining(words: Sequence[str]) -> str:
    """Return the word of a template behind which its command would be quoted for no shell; empty without one."""
    if Path(words[0]).name == _JOINING[0] or any(_COMMAND in word for word in words):
        return ""
    # Elsewhere it may be a name, as in ``-c ssh``.
    host = next(number for number, word in enumerate(words) if _HOST in word)
    behind = words.index("--") if "--" in words else len(words)
    return next((word for word in (*words[:host], *words[behind:]) if Path(word).name in _JOINING), "")
