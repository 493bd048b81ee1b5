"""Fuzz programs that run by hand and weekly: see CONTRIBUTING.md."""
