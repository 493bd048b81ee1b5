"""Progress, metrics, events, the HTML report, the model card, and traces of a run."""
