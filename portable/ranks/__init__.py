"""Processes: started, bound to their parent, kept in agreement, watched."""
