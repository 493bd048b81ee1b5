"""DDP and FSDP2."""
