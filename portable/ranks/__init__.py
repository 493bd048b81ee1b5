"""Rank processes: launch, collectives, consistency checks and watchdog."""
