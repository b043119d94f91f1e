"""The command lines that reach a host."""

from __future__ import annotations

import shlex

import pytest

from sglang_crashkit.collect.via import hosts_via
from sglang_crashkit.errors import UsageError

#: With a blank, a quote and what a shell would replace.
KIT = ["python3", "-m", "sglang_crashkit", "--output-dir=/tmp/it's $HOME/a"]
QUOTED = shlex.join(KIT)


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
    assert hosts_via(template, ["h-0"]).argv("h-0", KIT) == expected


@pytest.mark.parametrize("host", ["h", "gpu_a-01.example.org", "me@h", "[::1]", "fe80::1%eth0", "h+1:22"])
def test_a_hosts_name_may_be_any_that_is_in_use(host: str) -> None:
    assert hosts_via("ssh {host}", [host]).nodes == (host,)


@pytest.mark.parametrize(
    "host", ["", "-oProxyCommand=x", ".", "..", "a/b", "a b", "a;b", "$(x)", "a'b", "a\nb", "a\\b", "é", "h" * 254]
)
def test_what_is_no_hosts_name_is_given_to_no_command(host: str) -> None:
    with pytest.raises(UsageError, match="is not the name of a host"):
        hosts_via("ssh {host}", ["well", host])
