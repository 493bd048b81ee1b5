"""The site: python -m sphinx -W docs site."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pygments.lexers.special import TextLexer

import converters
import portable

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "portable-trainer"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_typehints = "description"
autodoc_member_order = "groupwise"
autodoc_inherit_docstrings = False
myst_heading_anchors = 4
html_theme = "furo"
html_title = project
html_copy_source = False
templates_path: list[str] = []
exclude_patterns: list[str] = []


for package in (portable, converters):
    for exported in package.__all__:
        getattr(package, exported)  # they are imported at the first use, and autodoc does not use them


def setup(app: Sphinx) -> None:
    """Show Mermaid diagrams as text, which needs no script. Forges draw them."""
    app.add_lexer("mermaid", TextLexer)
