"""Every class that hooks and writers export shows how it is used."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap

import pytest

from eventloop import hooks, writers
from eventloop.assembly.attach import DEFAULT_HOOKS

KEYS = {class_name: key for key, class_name in DEFAULT_HOOKS.items()}
EXPORTED = [getattr(package, name) for package in (hooks, writers) for name in package.__all__]
CLASSES = [each for each in EXPORTED if isinstance(each, type)]


def blocks(text: str) -> list[str]:
    """The paragraphs that `help` shows indented; one that begins further in goes on with the one before."""
    found: list[str] = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if found and paragraph.startswith(" " * 5):
            found[-1] += f"\n\n{paragraph}"
        elif paragraph.startswith(" " * 4):
            found.append(paragraph)
    return [textwrap.dedent(block) for block in found]


def words(code: str) -> set[str]:
    """The names, keywords and texts in a piece of code; its comments are left out."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        found |= {str(value) for _, value in ast.iter_fields(node) if isinstance(value, str)}
    return found


@pytest.mark.parametrize("cls", CLASSES)
def test_every_public_class_has_an_example(cls: type) -> None:
    """Its docstring has code that compiles and uses the class, by its name or by its key in `default_hooks`."""
    name = cls.__name__
    own = {name, KEYS.get(name, name)}
    naming = re.compile(rf"\b({'|'.join(own)})\b")
    examples = [block for block in blocks(cls.__doc__ or "") if naming.search(block)]

    assert examples, f"the docstring of {name} has no example"
    for example in examples:
        compile(example, name, "exec")
    assert any(own & words(example) for example in examples), f"no example of {name} uses it"
