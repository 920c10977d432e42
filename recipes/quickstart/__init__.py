"""A small language model trained on this machine while its processes are killed."""
