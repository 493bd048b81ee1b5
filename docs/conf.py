"""The site: python -m sphinx -W docs site."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

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
highlight_language = "none"
html_theme = "furo"
html_title = project
html_copy_source = False
html_use_index = html_domain_indices = False  # docs/api.md is one; on a phone its columns run out of the page
html_show_copyright = False
html_static_path = ["site"]
html_css_files = ["narrow.css"]
templates_path: list[str] = []
exclude_patterns: list[str] = []


for package in (portable, converters):
    for exported in package.__all__:
        getattr(package, exported)  # they are imported at the first use, and autodoc does not use them


def as_shown(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the cells of the notebook into the page that names it; a page outside is a file to download."""
    source[0] = source[0].replace("](../SECURITY.md)", "](path:../SECURITY.md)")
    if page == "api":
        cells = json.loads((Path(app.srcdir) / "notebook.ipynb").read_text("utf-8"))["cells"]
        texts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells[1:]]  # without its title
        shown = [text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in texts]
        source[0] = source[0].replace("<!-- the notebook -->", "\n\n".join(shown))


def setup(app: Sphinx) -> None:
    """Have :func:`as_shown` see each page."""
    app.connect("source-read", as_shown)
