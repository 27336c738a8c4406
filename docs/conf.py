"""Configure Sphinx: Markdown pages by MyST, the API reference from the docstrings, the theme furo."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from sphinx.application import Sphinx

import eventloop
from docs._generate.docstrings import to_rst
from docs._generate.links import offer_files
from docs._generate.maintainers import allow_without_menu, remove_from_search
from docs._generate.references import drop_private_bases, resolve_by_public_name

project = "eventloop"
author = "the authors of eventloop"
copyright = author
version = release = eventloop.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_generate"]
templates_path: list[str] = []
smartquotes = False
html_theme = "furo"
html_title = f"eventloop {version}"

myst_heading_anchors = 3

add_module_names = False
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
maximum_signature_line_length = 88


def setup(app: Sphinx) -> None:
    """Connect the rewrites: of docstrings, before napoleon reads them, of links, base classes and the search."""
    app.connect("source-read", offer_files)
    app.connect("autodoc-process-docstring", to_rst, priority=100)
    app.connect("autodoc-process-bases", drop_private_bases)
    app.connect("missing-reference", resolve_by_public_name)
    app.connect("env-updated", allow_without_menu)
    app.connect("html-collect-pages", remove_from_search)
