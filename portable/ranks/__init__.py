"""Processes of the ranks: launch, collectives, consistency checks, failures, and watchdog."""
