from __future__ import annotations

import pytest

from sglang_crashkit.notifications.plan import COMMAND, COMMAND_SECS, WEBHOOK, WEBHOOK_KIND, Plan, is_wanted
from sglang_crashkit.settings import OTLP_ENDPOINT


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [({}, False), ({COMMAND: " "}, False), ({COMMAND: "a"}, True), ({OTLP_ENDPOINT: "a:1"}, True)],
)
def test_nobody_is_told_by_default(environ: dict[str, str], wanted: bool) -> None:
    assert is_wanted(environ) is wanted


def test_a_command_is_split_without_a_shell() -> None:
    plan = Plan.from_environ({COMMAND: "page 'two words' $HOME;ls", COMMAND_SECS: "3"})
    assert plan.command == ("page", "two words", "$HOME;ls")
    assert plan.command_secs == 3.0


@pytest.mark.parametrize(
    "value",
    [
        "file:///etc/passwd",
        "ftp://host/x",
        "hooks.slack.com",
        "http://",
        "http://[",
        "http://h:x",
        "https://me:secret@h/x",
        "https://h/k y",
    ],
)
def test_a_wrong_url_is_a_problem_that_hides_it(value: str) -> None:
    plan = Plan.from_environ({WEBHOOK: value})
    assert plan.url == ""
    assert value not in plan.problems["webhook"]


def test_a_command_that_cannot_be_split_is_a_problem() -> None:
    plan = Plan.from_environ({COMMAND: "page 'half"})
    assert (plan.command, list(plan.problems)) == ((), ["command"])


@pytest.mark.parametrize(
    ("url", "named", "kind"),
    [
        ("https://hooks.slack.com/services/T/B/x", "", "slack"),
        ("http://alerts:9093/api/v2/alerts", "", "alertmanager"),
        ("http://host/x", "", "json"),
        ("http://mattermost/hooks/x", "Slack", "slack"),
        ("https://hooks.slack.com/services/T/B/x", "json", "json"),
    ],
)
def test_the_kind_follows_from_the_url_unless_it_is_named(url: str, named: str, kind: str) -> None:
    assert Plan.from_environ({WEBHOOK: url, WEBHOOK_KIND: named}).kind == kind
