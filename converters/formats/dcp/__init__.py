"""Read torch.distributed.checkpoint (DCP) folders."""
