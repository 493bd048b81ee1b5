"""Report the progress and the results of a run: metrics, events, HTML report, model card, and traces."""
