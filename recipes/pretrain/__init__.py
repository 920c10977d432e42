"""A whole training script: every flag of the guide, on plain Lightning."""
