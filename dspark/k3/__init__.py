"""Kimi K3's text decoder in plain PyTorch: configuration, layers, hybrid cache, checkpoints."""
