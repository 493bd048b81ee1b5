"""Read full state dicts that `torch.save` wrote."""
