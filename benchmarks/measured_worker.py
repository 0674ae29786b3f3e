"""The engine worker of bench_weights_engine.py: ours, and what loading and repacking alone take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file
from vllm.config import set_current_vllm_config

from partial_rollout.weights.loading import Reload, require_complete
from partial_rollout.weights.worker import WorkerExtension

if TYPE_CHECKING:
    import torch


class MeasuredWorker(WorkerExtension):
    """Mixed into vLLM's worker."""

    kept: list[tuple[str, torch.Tensor]]

    def keep(self, folder: str) -> None:
        """Read a checkpoint into this process's own memory."""
        files = sorted(Path(folder).glob("*.safetensors"))
        self.kept = [(name, tensor.clone()) for file in files for name, tensor in load_file(file).items()]

    def load_kept(self) -> None:
        """An update without transport."""
        model, reload = self.model_runner.model, Reload(self.model_runner.model)
        with set_current_vllm_config(self.model_runner.vllm_config):
            reload.start()
            require_complete(reload.expected(), model.load_weights(self.kept))
            reload.finish(self.model_runner.model_config)
