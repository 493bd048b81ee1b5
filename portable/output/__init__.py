"""Output folder or URL of a run: lock, uploads, export, and hub repository."""
