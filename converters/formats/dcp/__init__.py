"""Reader of torch.distributed.checkpoint (DCP) folders."""
