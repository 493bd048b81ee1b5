"""What people see of a run: progress, metrics, pictures, the report."""
