"""The house rules that can be checked in the source; each check is shown a violation that it must find."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbtide.base import errors

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "src").rglob("*.py"))
MODULE_LINES, FUNCTION_LINES = 400, 60
ERRORS = {n for n, x in vars(errors).items() if isinstance(x, type) and issubclass(x, errors.EbbtideError)}

FACTORIES = {
    "arange",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randint",
    "randn",
}
FACTORIES |= {"randperm", "scalar_tensor", "tensor", "zeros", "Generator"}
"""What makes a tensor on the default device, which a user's script may have set to anything."""
DEVICE_ROOMS = {"store", "engine", "wrap", "profiling"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def findings(source: str) -> list[str]:
    """Return the violations of house rules in one module's source."""
    found: list[str] = []
    if (lines := len(source.splitlines())) > MODULE_LINES:
        found.append(f"the module has {lines} lines; at most {MODULE_LINES}")
    tree = ast.parse(source)
    if tree.body and not ast.get_docstring(tree):
        found.append("the module has no docstring")
    for node in ast.walk(tree):
        found += [f"line {getattr(node, 'lineno', 0)}: {finding}" for finding in _of_node(node)]
    return found


def _of_node(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Assert):
        yield "assert vanishes under -O; raise"
    elif isinstance(node, ast.Global):
        yield f"global {', '.join(node.names)}"
    elif isinstance(node, ast.ExceptHandler) and node.type is None:
        yield "bare except"
    elif isinstance(node, ast.Call):
        name, passed = getattr(node.func, "id", getattr(node.func, "attr", "")), {k.arg for k in node.keywords}
        if name in ERRORS and None not in passed and not passed >= {"expected", "hint"}:
            yield f"{name} lacks what was expected, or what to do"
    elif isinstance(node, Function):
        if (lines := _lines(node)) > FUNCTION_LINES:
            yield f"{node.name} has {lines} lines; at most {FUNCTION_LINES}"
        if names := _unannotated(node):
            yield f"{node.name} has no annotation of {', '.join(names)}"


def without_device(source: str) -> list[str]:
    """Return the calls of torch's factories whose device depends on ``torch.set_default_device``."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [f"line {call.lineno}: torch.{name} without a device" for call in calls if (name := _deviceless(call))]


def _deviceless(call: ast.Call) -> str | None:
    function = call.func
    if not (isinstance(function, ast.Attribute) and getattr(function.value, "id", "") == "torch"):
        return None
    given = any(keyword.arg in ("device", None) for keyword in call.keywords) or (
        function.attr == "Generator" and bool(call.args)
    )
    return function.attr if function.attr in FACTORIES and not given else None


def _lines(node: Function) -> int:
    """Lines of a function without its docstring: documentation should cost nothing."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node):
        lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
    return lines


def _unannotated(node: Function) -> list[str]:
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    named += [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    names = [a.arg for a in named if a.annotation is None and a.arg not in ("self", "cls")]
    return names if node.returns is not None else [*names, "what it returns"]


def test_there_is_source() -> None:
    assert len(MODULES) > 10


def test_nothing_but_modules_is_shipped() -> None:
    """No draft or backup of an editor or a merge, which a wheel would hold too."""
    packages = (ROOT / "src/ebbtide", ROOT / "src/ebbtide_recipes")
    files = [path for package in packages for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert [path.name for path in files if path.suffix not in {".py", ".j2", ".typed"}] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT / "src")))
def test_module_keeps_the_house_rules(path: Path) -> None:
    assert findings(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("source", "finding"),
    [
        ("def f(x: int) -> None:\n    assert x", "line 2: assert vanishes under -O; raise"),
        ("def f() -> None:\n    global x, y", "line 2: global x, y"),
        ("try:\n    pass\nexcept:\n    pass", "line 3: bare except"),
        ("def f(x) -> None: ...", "line 1: f has no annotation of x"),
        ("def f(*a, k, **b): ...", "line 1: f has no annotation of k, a, b, what it returns"),
        ("class C:\n    async def m(self, x) -> int: ...", "line 2: m has no annotation of x"),
        ("def f() -> None:\n" + "    pass\n" * 60, "line 1: f has 61 lines; at most 60"),
        ("x = 1\n" * 401, "the module has 401 lines; at most 400"),
        ("raise ConfigError('no')", "line 1: ConfigError lacks what was expected, or what to do"),
        (
            "def f() -> ConfigError:\n    return ConfigError('no', hint='y')",
            "line 2: ConfigError lacks what was expected, or what to do",
        ),
        ("x = 1", "the module has no docstring"),
    ],
)
def test_what_breaks_a_rule_is_found(source: str, finding: str) -> None:
    assert finding in findings(source)


def test_what_keeps_the_rules_is_left_alone() -> None:
    body = '    """Say.\n\n    More.\n    """\n' + "    pass\n" * 59
    call = 'ConfigError("x", expected="z", hint="y")'
    source = f'"""Doc."""\n\ndef f(x: int, *a: int, **k: int) -> None:\n{body}\nraise {call}\n'
    assert findings(source) == []
    assert findings("") == []


@pytest.mark.parametrize(
    "path",
    [p for p in MODULES if {*p.relative_to(ROOT).parts} & DEVICE_ROOMS],
    ids=lambda p: str(p.relative_to(ROOT / "src")),
)
def test_no_tensor_is_made_on_whatever_device_is_the_default(path: Path) -> None:
    assert without_device(path.read_text(encoding="utf-8")) == []


def test_a_factory_without_a_device_is_found() -> None:
    source = "torch.empty(1)\ntorch.Generator()\ntorch.ones(1, device=d)\ntorch.Generator('cpu')\nx.new_empty(1)\n"
    assert without_device(source) == [
        "line 1: torch.empty without a device",
        "line 2: torch.Generator without a device",
    ]
