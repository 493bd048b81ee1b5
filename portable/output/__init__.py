"""Modules that manage the output folder or URL of a run.

They lock the output against other runs, upload files, export the model, and upload the export to
the Hugging Face Hub.
"""
