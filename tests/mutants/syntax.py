"""Patches of syntax: replace a piece of code that is found by its syntax tree within one function.

Layout, comments and the function's file do not matter. So a patch survives a refactoring that does
not change the code itself.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

_Function = ast.FunctionDef | ast.ClassDef


class PatchError(Exception):
    """The code of a patch does not occur exactly once."""


def patch(sources: Mapping[Path, str], where: str, old: str, new: str) -> tuple[Path, str]:
    """The path and the new text of the one file whose code changes.

    Args:
        sources: the text of each file that is searched.
        where: the qualified name of a function or class.
        old: an expression, statements that follow each other, or ``name=value`` of a call. ``...``
            as the body of a compound statement matches any body.
        new: what ``old`` becomes; nothing deletes statements or a keyword. ``...`` as a body is the
            body that ``old`` matched.

    Raises:
        PatchError: ``old`` does not occur exactly once.
    """
    name = where.rpartition(".")[2]
    trees = {path: ast.parse(text) for path, text in sources.items() if f" {name}" in text}
    found = [
        (path, place)
        for path, tree in trees.items()
        for scope in _scopes(tree, where)
        for place in _places(scope, old)
    ]
    if len(found) != 1:
        raise PatchError(f"{old!r} occurs {len(found)} times in {where}")
    path, place = found[0]
    place.replace(new)
    return path, ast.unparse(trees[path]) + "\n"


def _scopes(tree: ast.Module, where: str) -> Iterator[_Function]:
    """The definitions of that qualified name."""
    scopes: list[ast.Module | _Function] = [tree]
    for name in where.split("."):
        scopes = [
            node
            for scope in scopes
            for node in scope.body
            if isinstance(node, _Function) and node.name == name
        ]
    yield from scopes  # type: ignore[misc]


@dataclass(frozen=True)
class _Place:
    """Code in a tree: ``size`` elements of a list, or the whole of a field if ``index`` is None."""

    parent: ast.AST
    field: str
    index: int | None
    size: int = 1

    def replace(self, new: str) -> None:
        if self.index is None:
            setattr(self.parent, self.field, ast.parse(new, mode="eval").body)
            return
        nodes = getattr(self.parent, self.field)
        end = self.index + self.size
        if isinstance(nodes[self.index], ast.keyword):
            nodes[self.index : end] = _keywords(new)
            return
        if isinstance(nodes[self.index], ast.expr):
            nodes[self.index : end] = [ast.parse(new, mode="eval").body]
            return
        body = [node for old in nodes[self.index : end] for node in getattr(old, "body", [])]
        statements = ast.parse(dedent(new)).body
        for statement in statements:
            if _has_any_body(statement):
                statement.body = body  # type: ignore[attr-defined]
        nodes[self.index : end] = statements
        if not nodes:
            nodes.append(ast.Pass())


def _places(scope: ast.AST, old: str) -> list[_Place]:
    """The places of ``old`` in a scope; an expression as a statement counts as the statement."""
    wanted = ast.parse(dedent(old)).body
    found: list[_Place] = []
    is_expression = len(wanted) == 1 and isinstance(wanted[0], ast.Expr)
    expression = wanted[0].value if is_expression else None  # type: ignore[attr-defined]
    keywords = _keywords(old) if isinstance(wanted[0], ast.Assign) else []
    for parent in ast.walk(scope):
        for field, value in ast.iter_fields(parent):
            if isinstance(value, list):
                for index in range(len(value) - len(wanted) + 1):
                    part = value[index : index + len(wanted)]
                    if all(map(_is_equal, part, wanted)) or (
                        keywords and all(map(_is_equal, part, keywords))
                    ):
                        found.append(_Place(parent, field, index, len(wanted)))
                    elif expression is not None and _is_equal(value[index], expression):
                        found.append(_Place(parent, field, index))
            elif isinstance(parent, ast.Expr):
                continue  # counted as the statement
            elif expression is not None and _is_equal(value, expression):
                found.append(_Place(parent, field, None))
    return found


def _keywords(text: str) -> list[ast.keyword]:
    """Of ``name=value``; none of an assignment to anything but one name."""
    try:
        call = ast.parse(f"f({dedent(text)})", mode="eval").body
    except SyntaxError:
        return []
    return call.keywords if isinstance(call, ast.Call) else []


def _is_equal(node: object, wanted: ast.AST) -> bool:
    if type(node) is not type(wanted):
        return False
    assert isinstance(node, ast.AST)
    ignored = {"ctx", "body"} if _has_any_body(wanted) else {"ctx"}
    for field, value in ast.iter_fields(wanted):
        if field in ignored:
            continue
        other = getattr(node, field)
        if isinstance(value, list):
            if len(other) != len(value) or not all(map(_is_same, other, value)):
                return False
        elif not _is_same(other, value):
            return False
    return True


def _is_same(node: object, wanted: object) -> bool:
    return _is_equal(node, wanted) if isinstance(wanted, ast.AST) else node == wanted


def _has_any_body(node: ast.AST) -> bool:
    body = getattr(node, "body", None)
    if not isinstance(body, list) or len(body) != 1 or not isinstance(body[0], ast.Expr):
        return False
    value = body[0].value
    return isinstance(value, ast.Constant) and value.value is Ellipsis
