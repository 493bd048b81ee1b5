"""The output folder or URL: locking, contents and export."""
