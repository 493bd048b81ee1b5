"""From documents to the token cache."""
