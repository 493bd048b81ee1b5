"""Documents from files, object stores, the hub and the user's code."""
