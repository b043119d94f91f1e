from __future__ import annotations

import ast
import textwrap

import pytest

from featurelib.sglangsource import (
    SglangFile,
    SglangTree,
    arguments_of,
    calls_in,
    default_of,
    keyword,
    read_hooks,
    refers_to,
)

PRISTINE = """
    \"\"\"Text.\"\"\"
    import os

    @decorated(
        by=upstream,
    )
    def serve(port, host="here", *, interval=2.5):
        os.listen(port, timeout=5.0)

    class Server(
        Base,
    ):
        def stop(self): ...

        def start(self):
            self.open()

    if os:
        limit = 1
    else:
        limit = 2

    def serve_all(): ...
"""
PATCHED = """
    from sglang.srt.crashkit import on_serve, provide, there
    from sglang.srt.crashkit import gone

    def helper():
        there()

    @on_serve
    def serve(): ...

    later = provide()
    missing = gone
    other = helper

    class Server:
        stop = provide

        @gone
        def start(self): ...
"""


#: ``gone`` is a name that the kit lacks.
HOOK_TABLE = b"""
_HOOKS = {
    "on_serve": ("hooks", _undecorated),
    "provide": ("hooks", _nothing),
    "there": ("hooks", _nothing),
    "gone": ("hooks", _nothing),
}
"""


@pytest.fixture
def kit(make_kit):
    return make_kit({"hooks.py": "def on_serve(): ...\ndef provide(): ...\ndef there(): ...\n"})


def parsed(text, kit=None) -> SglangFile:
    return SglangFile(textwrap.dedent(text).encode(), kit, read_hooks(HOOK_TABLE))


def test_the_table_of_hooks_is_read_from_the_file_that_hands_them_out():
    assert read_hooks(HOOK_TABLE)["on_serve"] == "sglang_crashkit.hooks.on_serve"
    assert read_hooks(b"") == read_hooks(b"import os\n") == {}


def test_definitions_are_found_by_name():
    file = parsed(PRISTINE)
    assert isinstance(file.find("serve"), ast.FunctionDef)
    assert [ast.unparse(each) for each in file.definition("serve").decorator_list] == ["decorated(by=upstream)"]
    assert isinstance(file.find("Server.start"), ast.FunctionDef)
    assert file.find("Server.restart") is None
    assert file.find("serv") is None
    assert file.find("start") is None
    assert file.definition("Other.start") is None


def test_a_name_is_what_binds_it_last():
    file = parsed("def name(): ...\n\nname = 1\n\ndef name(last): ...\n")
    assert arguments_of(file.definition("name")) == {"last"}


def test_a_string_that_looks_like_a_statement_is_an_error_and_no_wrong_answer():
    with pytest.raises(SyntaxError):
        parsed('def outer():\n    text = """\ndef inner(): ...\n"""\n').find("outer")


def test_what_is_not_there_has_nothing():
    file = SglangTree({}.get).file("srt/gone.py")
    assert file.find("serve") is None
    assert not file.mentions("serve")
    assert not calls_in(file.find("serve"))


def test_calls_and_their_arguments():
    serve = parsed(PRISTINE).definition("serve")
    assert [ast.unparse(call) for call in calls_in(serve)] == ["decorated(by=upstream)", "os.listen(port, timeout=5.0)"]
    (listen,) = calls_in(serve, "listen")
    assert (keyword(listen, "timeout"), keyword(listen, "port")) == (5.0, None)
    assert not calls_in(serve, "list")
    assert (default_of(serve, "host"), default_of(serve, "port")) == ("here", None)
    assert arguments_of(serve) == {"port", "host", "interval"}


def test_an_import_alone_is_no_use():
    tree = parsed("from x import hook, other\nrun(hook)\n").whole()
    assert refers_to(tree, "hook")
    assert not refers_to(tree, "other")


def test_what_the_kit_decorates_provides_or_is_asked_for_is_its(kit):
    file = parsed(PATCHED, kit)
    assert file.taken_over_by("serve") == {"sglang_crashkit.hooks.on_serve"}
    assert file.taken_over_by("later") == {"sglang_crashkit.hooks.provide"}
    assert file.taken_over_by("Server.stop") == {"sglang_crashkit.hooks.provide"}
    assert file.kit_calls(file.find("helper")) == {"sglang_crashkit.hooks.there"}


def test_what_it_does_not_touch_is_not_its(kit):
    file = parsed(PATCHED, kit)
    assert not file.taken_over_by("helper")
    assert not file.taken_over_by("other")
    assert not file.kit_calls(file.find("serve").body[0])
    assert not parsed(PRISTINE, kit).kit_calls(parsed(PRISTINE).whole())


def test_a_function_that_the_kit_lacks_hooks_nothing(kit):
    file = parsed(PATCHED, kit)
    assert not file.taken_over_by("Server.start")
    assert file.find("missing") is None


def test_without_the_kit_nothing_is_its():
    file = parsed(PATCHED, None)
    assert not file.taken_over_by("serve")
    assert not file.kit_calls(file.whole())
    assert file.find("later") is None
