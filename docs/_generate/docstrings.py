"""Rewrite eventloop's docstrings to reStructuredText.

The docstrings are written for `help()`: names stand in single backticks, and an indented block is an example. Section heads
such as `Args:` are left for napoleon, which reads them afterwards.
"""

from __future__ import annotations

import ast
import re
import textwrap
from contextlib import suppress
from typing import Any

SECTION = re.compile(r"(Args|Raises|Returns|Yields|Attributes|Warns|Example|Examples|Note|Notes):$")
LITERAL = re.compile(r"(?<!`)`([^`]+)`(?!`)(?=(\w)?)")


def to_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Rewrite the lines of a docstring in place, as the event `autodoc-process-docstring` asks."""
    paragraphs = _paragraphs(lines)
    lines[:] = [line for kind, block in paragraphs for line in (*_RENDER[kind](block), "")]
    if what in ("attribute", "data", "property"):
        lines[:0] = [
            "..",
            "",
        ]  # an empty comment: napoleon reads a first line with a colon as "type: description"


def _paragraphs(lines: list[str]) -> list[tuple[str, list[str]]]:
    """Split a docstring into its text, its examples (indented blocks) and its sections (`Args:` and what is below)."""
    found: list[tuple[str, list[str]]] = []
    in_section = False
    for block in _blocks(lines):
        indented = all(line.startswith(" ") for line in block if line)
        in_example = bool(found) and found[-1][0] == "example"
        if indented and (in_section or in_example):
            found[-1][1].extend(["", *block])
        else:
            in_section = SECTION.match(block[0]) is not None
            example = indented or _is_code(block)
            found.append(("section" if in_section else "example" if example else "text", block))
    return found


def _blocks(lines: list[str]) -> list[list[str]]:
    """Split at empty lines, and where a section begins without one."""
    blocks: list[list[str]] = [[]]
    for line in lines:
        if not line.strip() or SECTION.match(line):
            blocks.append([])
        if line.strip():
            blocks[-1].append(line.rstrip())
    return [block for block in blocks if block]


def _text(block: list[str]) -> list[str]:
    """Make single backticks literals, and escape what reStructuredText would read as markup."""
    return _escaped("\n".join(block)).split("\n")


def _escaped(text: str) -> str:
    parts: list[str] = []
    end = 0
    for match in LITERAL.finditer(text):
        parts += [_without_markup(text[end : match.start()]), _literal(match)]
        end = match.end()
    return "".join([*parts, _without_markup(text[end:])])


def _literal(match: re.Match[str]) -> str:
    words = re.sub(r"\s+", " ", match[1])  # a literal that goes over a line's end would lose its indentation
    return f"``{words}``" + ("\\ " if match[2] else "")


def _without_markup(text: str) -> str:
    return re.sub(r"(\*|\||(?<=\w)_(?!\w))", r"\\\1", text)


def _is_code(block: list[str]) -> bool:
    """Recognise an example that is not indented: statements of Python, which no sentence is."""
    with suppress(SyntaxError):
        body = ast.parse("\n".join(block)).body
        return not all(isinstance(s, ast.Expr) and isinstance(s.value, ast.Name | ast.Constant) for s in body)
    return False


def _example(block: list[str]) -> list[str]:
    code = textwrap.dedent("\n".join(block))
    try:
        ast.parse(code)
        language = "python"
    except SyntaxError:
        language = "text"
    return [f".. code-block:: {language}", "", *textwrap.indent(code, "    ").split("\n")]


_RENDER = {"text": _text, "section": _text, "example": _example}
