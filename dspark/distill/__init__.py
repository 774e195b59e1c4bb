"""Distillation: prompts, the target's answers, anchored blocks, loss, trainer, checkpoints."""
