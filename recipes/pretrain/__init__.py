"""A whole training script: every flag of an older library's recipes, on plain Lightning."""
