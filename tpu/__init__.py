"""TPUs: `xla` is the backend on torch_xla, `compile` asks libtpu's compiler without a device."""
