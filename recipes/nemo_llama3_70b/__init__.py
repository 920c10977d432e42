"""Pretraining with NeMo 2: the flags of ``recipes.pretrain``, Megatron's parallelism, the engine's checkpoints."""
