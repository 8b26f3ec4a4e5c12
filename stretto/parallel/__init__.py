"""Several processes training one model, on torch.distributed alone."""
