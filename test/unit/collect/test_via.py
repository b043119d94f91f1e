"""The command lines that reach a host, and what is said where one does not answer."""

from __future__ import annotations

import shlex

import pytest

from sglang_crashkit.collect.gather import NodeRun, why_silent
from sglang_crashkit.collect.via import command_on, hosts_via, words_of
from sglang_crashkit.errors import UsageError

#: With a blank, a quote and what a shell would replace.
KIT = ["python3", "-m", "sglang_crashkit", "--output-dir=/tmp/it's $HOME/a"]
QUOTED = shlex.join(KIT)
KUBECTL = "kubectl exec {host} -c sglang --"


@pytest.fixture(autouse=True)
def everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("kubectl exec {host} -c sglang --", ["kubectl", "exec", "h-0", "-c", "sglang", "--", *KIT]),
        ("docker -H ssh://{host} exec sglang", ["docker", "-H", "ssh://h-0", "exec", "sglang", *KIT]),
        ("kubectl exec pod/{host} -- sh -lc {command}", ["kubectl", "exec", "pod/h-0", "--", "sh", "-lc", QUOTED]),
        ("gcloud compute ssh {host} --command={command}", ["gcloud", "compute", "ssh", "h-0", f"--command={QUOTED}"]),
        ("ssh {host}", ["ssh", "-o", "BatchMode=yes", "h-0", QUOTED]),
        ("/usr/bin/ssh -p 22 me@{host}", ["/usr/bin/ssh", "-o", "BatchMode=yes", "-p", "22", "me@h-0", QUOTED]),
        ("ssh {host} 'cd /opt && {command}'", ["ssh", "-o", "BatchMode=yes", "h-0", f"cd /opt && {QUOTED}"]),
        ("kubectl exec {host} -c ssh --", ["kubectl", "exec", "h-0", "-c", "ssh", "--", *KIT]),
        ("sudo -n ssh {host} {command}", ["sudo", "-n", "ssh", "h-0", QUOTED]),
    ],
)
def test_the_command_is_words_or_one_word_for_a_shell(template: str, expected: list[str]) -> None:
    assert command_on(words_of(template), "h-0", KIT) == expected


@pytest.mark.parametrize("host", ["h", "gpu_a-01.example.org", "me@h", "[::1]", "fe80::1%eth0", "h+1:22"])
def test_a_hosts_name_may_be_any_that_is_in_use(host: str) -> None:
    assert hosts_via("ssh {host}", [host]).nodes == (host,)


@pytest.mark.parametrize(
    "host", ["", "-oProxyCommand=x", ".", "..", "a/b", "a b", "a;b", "$(x)", "a'b", "a\nb", "a\\b", "é", "h" * 254]
)
def test_what_is_no_hosts_name_is_given_to_no_command(host: str) -> None:
    with pytest.raises(UsageError, match="is not the name of a host"):
        hosts_via("ssh {host}", ["well", host])


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("", "does not say where the host's name goes"),
        ("{host}", "does not say where the host's name goes"),
        ("ssh {node}", "does not say where the host's name goes"),
        ("ssh '{host}", "No closing quotation"),
    ],
)
def test_what_reaches_no_host_is_refused(template: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        hosts_via(template, ["a"])


@pytest.mark.parametrize(
    "template",
    ["sudo -n ssh {host}", "timeout 5 /usr/bin/ssh {host}", "autossh {host}", "kubectl exec {host} -- ssh in"],
)
def test_wrapped_ssh_must_be_told_where_the_command_goes(template: str) -> None:
    with pytest.raises(UsageError, match="has a shell take the command apart") as caught:
        hosts_via(template, ["h"])
    assert caught.value.next_step == f"--via '{template} {{command}}'"
    hosts_via(f"{template} {{command}}", ["h"])


@pytest.mark.parametrize(
    ("errors", "why", "following"),
    [
        ("sh: 1: python3: not found\n", "the collector cannot be run there: sh: 1: python3", "--remote-command"),
        (
            'error: Internal error occurred: OCI runtime exec failed: "python3": executable file not found in $PATH',
            "the collector cannot be run there: Internal error",
            "--remote-command",
        ),
        ('Error from server (NotFound): pods "h" not found\n', "there is no such pod or container", "exec h -c"),
        (
            'Defaulted container "a"\nerror: unable to upgrade connection: container not found ("sglang")\n',
            "or it does not run: unable to upgrade connection: container not found",
            "kubectl exec h -c sglang -- true",
        ),
        ('Error from server (Forbidden): pods "h" is forbidden\n', "it may not be entered: (Forbidden)", "-- true"),
        ("ssh: Could not resolve hostname h\n", "it cannot be reached: ssh: Could", "-- true"),
        ("me@h: Permission denied (publickey).\n", "it asks for a password, or takes no key", "BatchMode=yes"),
        ("kex_exchange_identification: Connection closed\n", "it turned the connection away", "--fan-out"),
        ("Host key verification failed.\n", "its host key is unknown here, or has changed", "known_hosts"),
        ("command terminated with exit code 137\n", "ended there with status 1 and without a result", "h/kubectl.log"),
        ("snapshot 1 of 3\nKilled\n", "without a result: Killed", "h/kubectl.log"),
    ],
)
def test_why_a_host_is_silent_is_told_with_what_helps(errors: str, why: str, following: str) -> None:
    problem = why_silent(NodeRun("h", 1, errors=errors), hosts_via(KUBECTL, ["h"]))
    assert problem.what == "host h"
    assert why in problem.why
    assert following in problem.next


def test_a_late_host_is_told_with_what_it_said_last() -> None:
    run = NodeRun("h", None, errors="snapshot 2 of 3\n", problem="no answer within 9 s", late=True)
    problem = why_silent(run, hosts_via(KUBECTL, ["h"]))
    assert problem.why == "no answer within 9 s: snapshot 2 of 3"
    assert problem.next == "raise --node-timeout, or look at it: kubectl exec h -c sglang -- true"
