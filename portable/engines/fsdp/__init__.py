"""Engine on DDP and FSDP2."""
