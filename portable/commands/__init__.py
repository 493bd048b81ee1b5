"""Commands that train nothing."""
