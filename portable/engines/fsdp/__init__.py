"""Engine based on DDP and FSDP2."""
