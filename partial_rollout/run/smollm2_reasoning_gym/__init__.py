"""The smallest recipe with a real model: SmolLM2-135M-Instruct on tasks of reasoning-gym, all from PyPI wheels."""
