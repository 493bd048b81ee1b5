"""The site: python -m sphinx -W docs site."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pygments.lexers.special import TextLexer

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "portable-trainer"
extensions = ["myst_parser"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = project
html_copy_source = False
templates_path: list[str] = []
exclude_patterns: list[str] = []


def setup(app: Sphinx) -> None:
    """Show Mermaid diagrams as text, which needs no script. Forges draw them."""
    app.add_lexer("mermaid", TextLexer)
