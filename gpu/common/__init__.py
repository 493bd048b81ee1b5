"""What both engines use."""
