"""Prepare a checkout for a release: python .ci/prepare_release.py REPOSITORY_URL TAG.

The package index shows README.md outside the repository, so the command replaces its relative links by links
into the repository at the tag. It also adds the URLs of the project to pyproject.toml. Do not commit the
changes.
"""

import re
import sys
from pathlib import Path


def link_absolutely(text: str, url: str, tag: str) -> str:
    """Replace the relative targets of Markdown links and images by URLs."""

    def replace(match: re.Match[str]) -> str:
        bang, label, target = match.groups()
        return f"{bang}[{label}]({url}/{'raw' if bang else 'blob'}/{tag}/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)", replace, text)


def add_urls(text: str, url: str, tag: str) -> str:
    """Add the section ``project.urls`` to the text of pyproject.toml."""
    pages = {"Repository": url, "Documentation": f"{url}/tree/{tag}/docs", "Issues": f"{url}/issues"}
    pages["Changelog"] = f"{url}/blob/{tag}/CHANGELOG.md"
    section = "".join(f'{name} = "{page}"\n' for name, page in pages.items())
    return text.replace("[project.scripts]\n", f"[project.urls]\n{section}\n[project.scripts]\n", 1)


def main(url: str, tag: str) -> None:
    """Change README.md and pyproject.toml in the current folder."""
    for name, change in (("README.md", link_absolutely), ("pyproject.toml", add_urls)):
        file = Path(name)
        file.write_text(change(file.read_text("utf-8"), url.rstrip("/"), tag), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
