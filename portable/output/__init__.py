"""Output folder or URL of a run: the lock, the uploads, the export, and the repository on the hub."""
