"""Time each pattern that the kit compiles, on texts made to be its worst; prints those that are slow as JSON."""

import ast
import importlib
import json
import pkgutil
import re
import signal
import sys
from pathlib import Path

import sglang_crashkit

# A quadratic one takes ten times as long.
SIZE, MOST_SECS = 60_000, 1.0
# What is cut to so many characters before: the message of an exception that is judged, a line of a debugger, of the
# kernel.
BOUNDS = {
    "analysis": 8_000,
    "sources/text/kernel_lines.py": 2_000,
    "capture/debugger.py": 2_000,
    "capture/cuda_core/reading.py": 4_096,
}
BOUNDED_SECS = 0.4
ROOT = Path(sglang_crashkit.__file__).parent
METHODS = {"match", "fullmatch", "search", "sub", "subn", "finditer", "findall", "split"}
parse = re._parser if hasattr(re, "_parser") else re.sre_parse
found, compiled = {}, re.compile


def record(pattern, flags=0):
    path = Path(sys._getframe(1).f_code.co_filename)
    if ROOT in path.parents and not isinstance(pattern, re.Pattern):
        found.setdefault((pattern, int(flags)), path)
    return compiled(pattern, flags)


# What a module compiles as it is imported is seen no other time.
if early := sorted(name for name in sys.modules if name.startswith("sglang_crashkit.")):
    sys.exit(f"imported before their patterns are recorded: {', '.join(early)}")
re.compile = record
for module in pkgutil.walk_packages([str(ROOT)], "sglang_crashkit."):
    if not module.name.endswith(("__main__", ".probe")):
        importlib.import_module(module.name)
re.compile = compiled
redact = importlib.import_module("sglang_crashkit.redact")
knowledge = importlib.import_module("sglang_crashkit.judge.knowledge")
for _needle, form, _instead in redact.FORMS:
    found[form, 0] = Path(redact.__file__)
for table in ("failures", "signs"):
    for name, form in knowledge.load(table).items():
        if isinstance(form, str) or name == "harmless":
            found[knowledge.pattern(table, name).pattern, 0] = Path(knowledge.__file__)
# By which methods each is used: by those called on its name; without one, by those called in its file.
named, used = {}, {}
for path in ROOT.rglob("*.py"):
    tree = ast.parse(path.read_text())
    calls = [
        (ast.unparse(node.value), node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in METHODS
    ]
    own = {
        node.targets[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and "re.compile" in ast.unparse(node.value)
    }
    used[path] = {method for of, method in calls if of != "re" and of not in own}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if methods := {method for of, method in calls if of == name}:
                for inner in ast.walk(node.value):
                    if isinstance(inner, ast.Constant) and isinstance(inner.value, (str, bytes)):
                        named.setdefault((path, inner.value), set()).update(methods)
        is_call = isinstance(node, ast.Call) and ast.unparse(node.func) in {f"re.{name}" for name in METHODS}
        if is_call and isinstance(node.args[0], ast.Constant):
            found.setdefault((node.args[0].value, 0), path)
            named[path, node.args[0].value] = {node.func.attr}


def sample(items):
    # What a pattern, parsed, matches, roughly.
    return "".join(map(piece, items))


def piece(item):
    kind, value = str(item[0]), item[1]
    if kind == "LITERAL":
        return chr(value)
    if kind == "NOT_LITERAL":
        return "a" if value != ord("a") else "b"
    if kind == "ANY":
        return "a"
    if kind == "IN":
        if str(value[0][0]) == "NEGATE":
            return next(char for char in "a 7b.-\n" if not any(matches(one, char) for one in value[1:]))
        return piece(value[0])
    if kind == "RANGE":
        return chr(value[0])
    if kind == "CATEGORY":
        return {"CATEGORY_DIGIT": "7", "CATEGORY_SPACE": " ", "CATEGORY_WORD": "a"}.get(str(value), "-")
    if kind == "BRANCH":
        return sample(value[1][0])
    if kind == "SUBPATTERN":
        return sample(value[3])
    if kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        return sample(value[2]) * max(1, min(int(value[0]), 20))
    if kind == "ATOMIC_GROUP":
        return sample(value)
    return ""


def matches(one, char):
    kind, value = str(one[0]), one[1]
    if kind == "CATEGORY":
        form = {"CATEGORY_SPACE": r"\s", "CATEGORY_WORD": r"\w", "CATEGORY_DIGIT": r"\d"}.get(str(value), r"[\s\S]")
        return re.match(form, char)
    return value == ord(char) if kind == "LITERAL" else value[0] <= ord(char) <= value[1]


def repeats(items, before=""):
    for item in items:
        kind, value = str(item[0]), item[1]
        if kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            yield before, sample(value[2])
            yield from repeats(value[2], before)
        elif kind == "SUBPATTERN":
            yield from repeats(value[3], before)
        elif kind == "BRANCH":
            for branch in value[1]:
                yield from repeats(branch, before)
        before += piece(item)


USUAL = ["a", "7", " ", "a ", "\n", "7, ", "a.", "a:", "(", "/", "a/", "'", '"', "\\", "a=", "-", "`", "<", "x::"]
USUAL += ["k: 'v' ", "._"]


def inputs(pattern, flags, size):
    parsed = parse.parse(pattern, flags)
    for before, body in repeats(parsed):
        for unit in (body, before + body):
            if unit:
                yield before + unit * (size // len(unit)) + "\0"
    for unit in [sample(parsed), *USUAL]:
        if unit:
            yield unit * (size // len(unit)) + "\0"


def give_up(*_):
    raise TimeoutError


signal.signal(signal.SIGVTALRM, give_up)
slow = []
for (pattern, flags), path in found.items():
    is_bytes = isinstance(pattern, bytes)
    text = pattern.decode("latin-1") if is_bytes else pattern
    expression = re.compile(pattern, flags)
    own_path = str(path.relative_to(ROOT))
    bound = next((most for begin, most in BOUNDS.items() if own_path.startswith(begin)), None)
    size, most_secs = (SIZE, MOST_SECS) if bound is None else (bound, BOUNDED_SECS)
    methods = named.get((path, pattern)) or used[path] or {"search"}
    for given in dict.fromkeys(inputs(text, flags, size)):
        subject = given.encode("latin-1") if is_bytes else given
        signal.setitimer(signal.ITIMER_VIRTUAL, most_secs)
        try:
            if methods <= {"match", "fullmatch"}:
                expression.fullmatch(subject)
                expression.match(subject)
            else:
                for _ in expression.finditer(subject):
                    pass
        except TimeoutError:
            slow.append([str(path.relative_to(ROOT)), text, sorted(methods), given[:60]])
            break
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
sys.stdout.write(json.dumps({"count": len(found), "slow": slow}))
