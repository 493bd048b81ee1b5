"""Planning of a run before it starts: memory, communication, time, and price under each strategy."""
