"""Reach hosts through a command that a user names, such as ``kubectl exec {host} -c sglang --`` or ``ssh {host}``.

No shell runs here: the template is split into words as a shell would do, and ``{host}`` is replaced in each. The remote
command follows as further words, which kubectl and docker pass on unchanged. Where the template has ``{command}``, the
remote command takes its place as one word, quoted for a remote shell. ssh always runs a remote shell, so after a
template that begins with ssh the remote command is one such word.

Killing the local ssh or kubectl does not stop the remote collector: it stops when its output has no reader
(`cli.main.end_with_reader`). The nodes of a Slurm job are reached by ``srun --overlap``; Slurm itself lists them, and
cancels the step on a node that is given up. All options and formats of its commands exist since Slurm 20.11, which
introduced ``--overlap``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from sglang_crashkit.capture.tools import ToolRun, run_tool
from sglang_crashkit.collect.gather import Transport
from sglang_crashkit.errors import CrashkitError, NothingToDoError, UsageError

_HOST, _COMMAND = "{host}", "{command}"
_EXAMPLE = 'such as --via "kubectl exec {host} -c sglang --" or --via "ssh {host}"'
#: A host's name is also a folder's name here, and a remote shell may see it: options, paths and quotes are refused.
_NAME = re.compile(r"[\w\[][\w.:@%+\[\]-]{0,252}", re.ASCII)
#: The program that joins its words with blanks, for a remote shell to split again.
_SSH = "ssh"
#: A job, a task of an array, or a component of a heterogeneous job.
_JOB_ID = re.compile(r"\d+(_\d+|\+\d+)?")
#: One line for each job: the id that srun takes, the id that people see, the state, the nodes.
_JOB_FORMAT = "%A|%i|%T|%N"
#: The controller of a busy cluster takes seconds to answer.
_ASK_SECS = 60.0
#: Variables that say where Slurm is; the others with these prefixes would act as options of srun within a job.
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CONF_SERVER")
_SLURM_PREFIXES = ("SLURM_", "SRUN_", "SBATCH_", "SALLOC_", "SQUEUE_", "SCANCEL_", "SCONTROL_")


def hosts_via(template: str, hosts: Sequence[str]) -> Transport:
    """Return a transport to the hosts, each once, by the command that `template` is the pattern of.

    Raises:
        UsageError: the command is not installed here, the template has no ``{host}``, or a host's name is invalid.
    """
    words = _words_of(template)
    if not hosts:
        raise UsageError("there is no host in the list", next_step="--hosts A,B")
    for host in hosts:
        if not _NAME.fullmatch(host):
            raise UsageError(
                f"{host[:300]!r} is not the name of a host",
                next_step="use letters, digits and _ . : @ % + - [ ], and put what is alike in all names into --via",
            )
    nodes, program = tuple(dict.fromkeys(hosts)), Path(words[0]).name
    return Transport(
        nodes=nodes,
        noun="host",
        title=f"{len(nodes)} host{'' if len(nodes) == 1 else 's'} by {program}",
        # Only the program's name: the other words of the template may hold a secret.
        identity={"via": program},
        log=f"{program}.log",
        look=lambda node: shlex.join(_command_on(words, node, ["true"])),
        argv=functools.partial(_command_on, words),
        # ssh must not ask in a window, where no user answers.
        environ={**os.environ, "SSH_ASKPASS_REQUIRE": "never"},
    )


def job_via(name: str, container: str | None = None) -> Transport:
    """Return a transport to the nodes of the running Slurm job `name`, each reached by a step of its own.

    `container` is a pattern of the name of the pyxis container to run in, with ``{job_id}`` and ``{node}``.

    Raises:
        UsageError: `name` is no id of a job, or the id of several jobs.
        NothingToDoError: there is no such job, or it does not run.
        CrashkitError: Slurm is not here or does not answer.
    """
    if not _JOB_ID.fullmatch(name):
        raise UsageError(f"{name!r} is not the id of a Slurm job", next_step="squeue --me")
    done = _ask_slurm("squeue", "--noheader", "--states=all", f"--jobs={name}", f"--format={_JOB_FORMAT}")
    lines = [line.strip().split("|", 3) for line in done.text.splitlines() if line.count("|") >= 3]
    if done.status and "Invalid job id" not in done.errors:
        raise CrashkitError(f"squeue says nothing of job {name}: {_last_line(done.errors)}", next_step="scontrol ping")
    if not lines:
        raise NothingToDoError(f"Slurm knows no job {name}, or no longer", next_step="squeue --me")
    if len(lines) > 1:
        parts = ", ".join(shown for _number, shown, _state, _nodes in lines[:8])
        raise UsageError(f"job {name} is {len(lines)} jobs: {parts}", next_step=f"name one: --slurm-job {lines[0][1]}")
    number, _shown, state, listed = lines[0]
    if state != "RUNNING" or not listed:
        raise NothingToDoError(f"job {name} does not run: {state}", next_step=f"scontrol show job {name}")
    # The list of nodes is as in ``n[1-2],m7``.
    done = _ask_slurm("scontrol", "show", "hostnames", listed)
    if done.status or not (nodes := tuple(done.text.split())):
        raise CrashkitError(f"scontrol cannot read the list of nodes {listed}: {_last_line(done.errors)}")
    words = ["srun", "--overlap", f"--jobid={number}", f"--nodelist={_HOST}", "--nodes=1", "--ntasks=1"]
    if container is not None:
        # Where a container of that name runs, pyxis starts the command in it, within the workers' namespaces.
        words.append(f"--container-name={container.replace('{job_id}', number).replace('{node}', _HOST)}")
    # The name is unique for each run and node: cancelling must not hit the step of another run or node.
    step = f"crashkit-{secrets.token_hex(4)}-{_HOST}"
    return Transport(
        nodes=nodes,
        noun="node",
        title=f"job {name} on {len(nodes)} nodes",
        identity={"job": name},
        log="srun.log",
        look=lambda node: f"scontrol show node {node}",
        argv=functools.partial(_command_on, [*words, f"--job-name={step}"]),
        environ=client_environ(os.environ),
        # Killing srun does not end the processes that it started on a node.
        give_up=lambda node: _cancel(number, step.replace(_HOST, node)),
    )


def _command_on(template: Sequence[str], host: str, command: Sequence[str]) -> list[str]:
    """Return the arguments that run `command` on a host, from the words of a template."""
    words, quoted = [word.replace(_HOST, host) for word in template], shlex.join(command)
    if any(_COMMAND in word for word in words):
        return [word.replace(_COMMAND, quoted) for word in words]
    return [*words, quoted] if Path(words[0]).name == _SSH else [*words, *command]


def _words_of(template: str) -> list[str]:
    """Return the words of a template; UsageError: its command is not installed here, or it has no ``{host}``."""
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise UsageError(f"--via {template}: {error}", next_step=f"name a command, {_EXAMPLE}") from None
    if not any(_HOST in word for word in words[1:]):
        raise UsageError(
            f"--via {template!r} does not say where the host's name goes", next_step=f"put {{host}} there, {_EXAMPLE}"
        )
    # Only before the host, and behind "--", the word ssh is a program; elsewhere it may be a name, as in ``-c ssh``.
    host = next(number for number, word in enumerate(words) if _HOST in word)
    behind = words.index("--") if "--" in words else len(words)
    is_behind = any(Path(word).name == _SSH for word in (*words[1:host], *words[behind:]))
    if is_behind and Path(words[0]).name != _SSH and not any(_COMMAND in word for word in words):
        raise UsageError(
            f"--via {template!r}: {_SSH} has a shell take the command apart, so say where it goes",
            next_step=f"--via {shlex.quote(f'{template} {_COMMAND}')}",
        )
    if shutil.which(words[0]) is None:
        raise UsageError(f"--via: there is no command {words[0]} here", next_step="name its path, or set PATH")
    if Path(words[0]).name == _SSH:
        # Without BatchMode ssh asks for a password, reads an empty one and fails. ssh takes an option's first value.
        words[1:1] = ["-o", "BatchMode=yes"]
    return words


def _cancel(number: str, step: str) -> None:
    """Have Slurm kill the processes of a step; a node that does not answer does so when it is back."""
    with contextlib.suppress(CrashkitError):
        done = _ask_slurm("squeue", "--noheader", "--steps", f"--jobs={number}", "--format=%i|%j")
        pairs = [line.strip().partition("|") for line in done.text.splitlines()]
        if steps := [found for found, _bar, its in pairs if its == step]:
            _ask_slurm("scancel", "--signal=KILL", *steps)


def _ask_slurm(*argv: str) -> ToolRun:
    """Run one of Slurm's commands and return its output; CrashkitError: it did not answer in time."""
    done = run_tool(argv, _ASK_SECS, environ=client_environ(os.environ), apart=True)
    if done.status is None:
        next_step = "scontrol ping" if shutil.which(argv[0]) else "run it where Slurm's commands are on PATH"
        raise CrashkitError(f"Slurm does not answer: {done.reason}", next_step=next_step)
    return done


def client_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without a job's variables that act as options of Slurm's commands.

    In a job's script ``SLURM_NTASKS``, ``SLURM_MEM_PER_NODE`` and others are options that the step must not have.
    """
    return {name: value for name, value in environ.items() if name in _KEPT or not name.startswith(_SLURM_PREFIXES)}


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no reason given"
