"""Checks blocks without running them: syntax, options of commands, names of imports."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from .blocks import ROOT, Block

_INSTALL = re.compile(
    r"(sudo )?(\S*/)?(pip3?|uv|apt|apt-get|git clone|cd|source|\.) |python3? -m (venv|pip) |export "
)
_SEPARATORS = ("&&", "||", ";", "|", "&", "(", ")")
_LOCAL = ("benchmarks", "tests", "spec", "examples")


def is_install(line: str) -> bool:
    """Whether a line only sets up an environment; the session ``wheel`` covers installation."""
    return bool(_INSTALL.match(line.strip() + " "))


def faults(block: Block) -> Iterator[str]:
    """What is wrong in a block."""
    if block.marker_fault:
        yield block.marker_fault
    if block.language == "python":
        yield from _python_faults(block)
        return
    result = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    if result.returncode:
        yield result.stderr.strip()
        return
    for words in commands_of(block.text):
        yield from command_faults(words)


def commands_of(text: str) -> Iterator[list[str]]:
    """The words of each simple command in shell text, without here-documents and redirections."""
    text = re.sub(r"<<-?\s*'?\"?(\w+)'?\"?(.*?)\n.*?^\s*\1$", r"\2", text, flags=re.DOTALL | re.M)
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        try:
            for word in [*lexer, ";"]:
                if word in _SEPARATORS:
                    if words:
                        yield words
                    words = []
                else:
                    words.append(word)
        except ValueError:
            continue  # a quoted text goes on in the next line


def command_faults(words: Sequence[str]) -> Iterator[str]:
    """What is wrong in one command, if it is one of the project."""
    # Variables before the command, and what runs another.
    words = [word for i, word in enumerate(words) if "=" not in word or i > 0]
    while words and words[0] in ("sudo", "time", "env", "exec"):
        words = words[1:]
    if ">" in words:
        words = words[: words.index(">")]
    if not words:
        return
    name = words[0].rpartition("/")[2]
    if name == "pagespec":
        yield from _pagespec_faults(words[1:])
    elif re.fullmatch(r"python3?", name) and words[1:2] == ["-m"] and len(words) > 2:
        if words[2] == "pagespec.cli":
            yield from _pagespec_faults(words[3:])
        elif words[2].partition(".")[0] in _LOCAL:
            yield from _module_faults(words[2], words[3:])
    elif re.fullmatch(r"python3?", name) and words[1:] and words[1].endswith(".py"):
        yield from _file_faults(words[1])
    elif name == "nox":
        yield from _nox_faults(words[1:])
    elif words[0].startswith((".ci/", "./")):
        yield from _file_faults(words[0])


def _file_faults(path: str) -> Iterator[str]:
    # A bare name is a file that the reader writes.
    if "/" in path and not (ROOT / path).exists():
        yield f"there is no file {path}"


def _pagespec_faults(words: Sequence[str]) -> Iterator[str]:
    import typer

    from pagespec.cli.main import app

    command = typer.main.get_command(app)
    path, rest = "pagespec", list(words)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            yield f"{path} has no command {rest[0]}"
            return
        command, path = command.commands[rest[0]], f"{path} {rest[0]}"
        rest.pop(0)
    if "--help" in rest or hasattr(command, "commands"):
        return
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            command.make_context(path, rest)
    except Exception as error:  # errors of usage, whose class depends on typer's release
        text = getattr(error, "message", "") or said.getvalue().strip() or repr(error)
        yield f"{path}: {text}"


def _module_faults(name: str, words: Sequence[str]) -> Iterator[str]:
    path = _path_of(name)
    if path is None:
        yield f"there is no module {name}"
        return
    known = _option_names(path)
    for word in words:
        option = word.partition("=")[0]
        if re.fullmatch(r"--[a-z][\w-]*", option) and option not in known:
            yield f"{name} has no option {option}"
        if word == "--":
            return


def _path_of(name: str) -> Path | None:
    base = ROOT.joinpath(*name.split("."))
    for path in (base.with_suffix(".py"), base / "__main__.py"):
        if path.exists():
            return path
    return None


@cache
def _option_names(path: Path) -> frozenset[str]:
    """Options that a program may have: texts that are options in it and in what it imports from
    the repository, and parameters of its functions, which typer makes options."""
    found: set[str] = {"--help"}
    for file in _with_imports(path):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.update(re.findall(r"--[a-z][\w-]*", node.value))
            elif isinstance(node, ast.arg):
                name = node.arg.replace("_", "-")
                found.update((f"--{name}", f"--no-{name}"))
    return frozenset(found)


def _with_imports(path: Path) -> list[Path]:
    """A file, and the files of the repository that it imports, directly or not."""
    found, todo = [path], [path]
    while todo:
        file = todo.pop()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [one.name for one in node.names]
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                if node.level:
                    package = file.relative_to(ROOT).parts[: -node.level]
                    module = ".".join((*package, *filter(None, [module])))
                names = [module, *(f"{module}.{one.name}" for one in node.names)]
            for name in names:
                inner = _path_of(name) if name.partition(".")[0] in _LOCAL else None
                if inner is not None and inner not in found:
                    found.append(inner)
                    todo.append(inner)
    return found


def _nox_faults(words: Sequence[str]) -> Iterator[str]:
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    sessions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    is_session = False
    for word in words:
        if word == "--":
            return
        if word.startswith("-"):
            is_session = word in ("-s", "--session", "--sessions")
        elif is_session and word not in sessions:
            yield f"noxfile.py has no session {word}"


def _python_faults(block: Block) -> Iterator[str]:
    try:
        tree = ast.parse(block.text)
        if not block.fragment:
            compile(block.text, block.place, "exec")
    except SyntaxError as error:
        if block.fragment:
            return
        yield f"{error.msg} (line {block.line + (error.lineno or 1) - 1})"
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pagespec"):
            yield from _import_faults(node)


def _import_faults(node: ast.ImportFrom) -> Iterator[str]:
    try:
        module = importlib.import_module(node.module or "")
    except ImportError as error:
        yield str(error)
        return
    for name in node.names:
        if not hasattr(module, name.name):
            yield f"{node.module} has no {name.name}"
