"""Sphinx configuration. Build the site with ``python -m sphinx -W docs site``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import portable
from portable import converters

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "portable-trainer"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_typehints = "description"
autodoc_member_order = "groupwise"
autodoc_inherit_docstrings = False
myst_heading_anchors = 4
highlight_language = "none"
html_theme = "furo"
html_title = project
html_copy_source = False
# docs/api.md is the index. The columns of a generated index are wider than the screen of a phone.
html_use_index = html_domain_indices = False
html_show_copyright = False
html_static_path = ["site"]
html_css_files = ["custom.css"]
templates_path: list[str] = []
exclude_patterns: list[str] = []


for package in (portable, converters):
    for exported in package.__all__:
        getattr(package, exported)  # Import the name now, because autodoc does not trigger lazy imports.


def prepare_source(app: Sphinx, page: str, source: list[str]) -> None:
    """Insert the cells of the notebook into the API page, and link to SECURITY.md as a download.

    Args:
        app: The Sphinx application.
        page: Name of the page, without suffix.
        source: One element, the text of the page. It is changed in place.
    """
    source[0] = source[0].replace("](../SECURITY.md)", "](path:../SECURITY.md)")
    if page == "api":
        cells = json.loads((Path(app.srcdir) / "notebook.ipynb").read_text("utf-8"))["cells"]
        cells = cells[1:]  # The first cell is the title, which the page has already.
        texts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
        blocks = [text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in texts]
        source[0] = source[0].replace("<!-- the notebook -->", "\n\n".join(blocks))


def setup(app: Sphinx) -> None:
    """Call :func:`prepare_source` for each page."""
    app.connect("source-read", prepare_source)
