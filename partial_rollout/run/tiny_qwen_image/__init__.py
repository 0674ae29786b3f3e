"""The tiny Qwen-Image of the CPU job: its checkpoint, its reward, its training."""
