"""Reader of full state dicts that `torch.save` wrote."""
