"""Checks of the project's language, which ``python -m tests.language`` runs.

The package measures docstrings, prose and names, and compares the figures with ``baseline.json``. Figures
may fall, but they may not rise.
"""
