"""Rank processes: launch, collectives, consistency checks, failures, and watchdog."""
