"""The site: python -m sphinx -W docs site."""

project = "portable-trainer"
extensions = ["myst_parser"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = project
html_copy_source = False
templates_path: list[str] = []
exclude_patterns: list[str] = []
