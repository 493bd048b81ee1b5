"""Progress, metrics, events, pictures and the HTML report of a run."""
