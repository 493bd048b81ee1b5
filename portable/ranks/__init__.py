"""Rank processes: launch, rendezvous, collectives, consistency checks and watchdog."""
