"""``builtin:pydoc``: question → docstring pairs from the standard library of the running Python.

The sources are parsed, never imported, and the same Python always gives the same rows.
"""

from __future__ import annotations

import ast
import functools
import inspect
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ebbtide.base.errors import DataError
from ebbtide_recipes.skeleton.rows import Row

MODULES = """
abc argparse array ast asyncio base64 bdb bisect bz2 calendar cmd code codecs codeop collections colorsys
compileall concurrent configparser contextlib contextvars copy copyreg csv ctypes curses dataclasses datetime
dbm decimal difflib dis doctest email encodings enum filecmp fileinput fnmatch fractions ftplib functools
genericpath getopt getpass gettext glob graphlib gzip hashlib heapq hmac html http imaplib importlib inspect io
ipaddress json keyword linecache locale logging lzma mailbox mimetypes modulefinder multiprocessing netrc ntpath
numbers opcode operator optparse os pathlib pdb pickle pickletools pkgutil platform plistlib poplib posixpath
pprint profile pstats pty py_compile pyclbr pydoc queue quopri random re reprlib rlcompleter runpy sched secrets
selectors shelve shlex shutil signal site smtplib socket socketserver sqlite3 ssl stat statistics string
stringprep struct subprocess symtable sysconfig tabnanny tarfile tempfile textwrap threading timeit tkinter token
tokenize tomllib trace traceback tracemalloc tty turtle types typing unittest urllib uuid venv warnings wave
weakref webbrowser wsgiref xml xmlrpc zipapp zipfile zipimport zoneinfo
"""
"""Modules that are read; one that the running Python does not have is passed over."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def rows(seed: int = 0) -> list[Row]:
    """Return the question → answer pairs, sorted by question and then shuffled by the seed.

    Raises:
        DataError: This Python has no sources of its standard library.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    answers = _answers(library)
    if not answers:
        raise DataError(
            f"no Python sources in {library}",
            expected="the standard library as .py files",
            hint="use a Python that was installed with its sources, or pass a data set file",
        )
    pairs: list[Row] = [{"question": question, "answer": answers[question]} for question in sorted(answers)]
    random.Random(seed).shuffle(pairs)
    return pairs


@functools.cache
def _answers(library: Path) -> dict[str, str]:
    """Return question → answer; cached, because parsing takes seconds."""
    answers: dict[str, str] = {}
    for module, path in _sources(library):
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        for name, answer in _documented(tree, module):
            answers.setdefault(f"What does `{name}` do?", answer)
    return answers


def _sources(library: Path) -> Iterator[tuple[str, Path]]:
    """Yield module name and source file of every public module in the list; packages are walked."""
    for name in MODULES.split():
        if (library / f"{name}.py").is_file():
            yield name, library / f"{name}.py"
        for path in sorted((library / name).rglob("*.py")):
            parts = path.relative_to(library).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            if not any(part.startswith("_") or part in ("test", "tests", "idle_test") for part in parts):
                yield ".".join(parts), path


def _documented(tree: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield dotted name and answer of every public definition with a docstring, methods included."""
    for node in tree.body:
        if not isinstance(node, Definition) or node.name.startswith("_"):
            continue
        name = f"{prefix}.{node.name}"
        if docstring := ast.get_docstring(node):
            yield name, f"{_signature(node, name)}\n\n{inspect.cleandoc(docstring)}"
        if isinstance(node, ast.ClassDef):
            yield from _documented(node, name)


def _signature(node: Definition, name: str) -> str:
    """Write the signature as it would be called; a class shows its bases."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {name}({bases})" if bases else f"class {name}"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{word} {name}({ast.unparse(node.args)}){returns}"
