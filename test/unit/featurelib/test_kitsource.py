from __future__ import annotations

HOOKS = """
    import os
    from multiprocessing import connection

    from sglang_crashkit import helpers
    from sglang_crashkit.helpers import Settings, relay as pass_on

    NAME = "named at the top"

    def on_event(value: helpers.Unused = None) -> helpers.Unused:
        def inner():
            connection.wait([])
        pass_on(NAME)
        return Settings.read().limit

    def unconnected():
        os.killpg(1, 9)
"""
HELPERS = """
    import signal

    class Unused:
        def method(self):
            signal.alarm(1)

    class Settings:
        limit: int = 5

        @classmethod
        def read(cls):
            return signal.getitimer(0)

    def relay(what):
        relay(what)
        return signal.pause(0o600)
"""


def test_functions_and_modules_are_known_by_their_dotted_names(make_kit):
    kit = make_kit({"hooks.py": HOOKS, "helpers.py": HELPERS})
    assert kit.has("sglang_crashkit.hooks")
    assert kit.has("sglang_crashkit.hooks.on_event")
    assert kit.has("sglang_crashkit.helpers.Settings")
    assert not kit.has("sglang_crashkit.hooks.on_other_event")
    assert not kit.has("sglang_crashkit.other.on_event")
    assert not kit.has("sglang.hooks.on_event")
    assert not kit.has("os.killpg")


def test_what_a_function_uses_is_followed_through_the_kit(make_kit):
    reach = make_kit({"hooks.py": HOOKS, "helpers.py": HELPERS}).reach("sglang_crashkit.hooks.on_event")
    assert {"multiprocessing.connection.wait", "signal.pause", "signal.getitimer"} <= reach.names
    assert "sglang_crashkit.helpers.relay" in reach.names
    assert {"named at the top", 0o600} <= reach.constants
    assert "limit" in reach.attributes


def test_what_it_does_not_use_is_not_reached(make_kit):
    reach = make_kit({"hooks.py": HOOKS, "helpers.py": HELPERS}).reach("sglang_crashkit.hooks.on_event")
    assert "os.killpg" not in reach.names
    # An annotation uses nothing.
    assert "signal.alarm" not in reach.names


def test_nothing_is_reached_from_a_function_that_is_not_there(make_kit):
    reach = make_kit({"hooks.py": HOOKS}).reach("sglang_crashkit.hooks.gone")
    assert reach.names == {"sglang_crashkit.hooks.gone"}
    assert not reach.constants


def test_functions_and_strings_of_a_module(make_kit):
    kit = make_kit({"cli/main.py": 'COMMANDS = ("apply", "revert")\ndef main(): ...\nclass Other: ...\n'})
    assert kit.functions("sglang_crashkit.cli.main") == {"main"}
    assert kit.functions("sglang_crashkit.cli.other") == set()
    assert kit.strings("sglang_crashkit.cli.main.COMMANDS") == {"apply", "revert"}
    assert kit.strings("sglang_crashkit.cli.main.OTHERS") == set()


def test_the_pytest_plugin_is_the_one_that_is_registered_and_there(make_kit):
    registered = '[project.entry-points.pytest11]\nsglang_crashkit = "sglang_crashkit.plugin"\n'
    assert make_kit({}, registered).pytest_plugin() is None
    assert make_kit({"plugin.py": ""}).pytest_plugin() is None
    assert make_kit({"plugin.py": ""}, registered).pytest_plugin() == "sglang_crashkit.plugin"
