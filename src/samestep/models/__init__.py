"""Models: pretrained weights, attention, losses, LoRA, scores of classes."""
