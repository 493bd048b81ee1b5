"""Read, cast, and transform checkpoint tensors, which may be stored in several pieces."""
