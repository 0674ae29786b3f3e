"""What a worker asks of the weight channel."""

from __future__ import annotations

from importlib.util import find_spec, module_from_spec
from types import SimpleNamespace

import torch

from partial_rollout.diffusion import worker_extension
from partial_rollout.diffusion.worker_extension import DiffusionWorkerExtension
from partial_rollout.weights import transport
from partial_rollout.weights.directory import DIRECTORY_VARIABLE, SECRET_VARIABLE


def test_it_takes_weights_from_a_trainer_on_another_gpu(monkeypatch):
    """A worker that named its GPU would be refused: the trainer has another one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(transport, "CudaRuntime", lambda: SimpleNamespace(identify=lambda _: "GPU-7"))
    assert transport.Transports().identify(torch.device("cuda", 0)) == "GPU-7"
    spec = find_spec(worker_extension.__name__)
    on_a_gpu = module_from_spec(spec)
    spec.loader.exec_module(on_a_gpu)
    asked = {}

    def receiver(*_, **options):
        asked.update(options)
        raise RuntimeError("asked")

    monkeypatch.setenv(DIRECTORY_VARIABLE, "/nowhere")
    monkeypatch.setenv(SECRET_VARIABLE, "00")
    monkeypatch.setattr(on_a_gpu, "WeightReceiver", receiver)
    worker = on_a_gpu.DiffusionWorkerExtension()
    worker.rank = 0
    worker.model_runner = SimpleNamespace(pipeline=SimpleNamespace(device=torch.device("cuda", 0)))
    assert worker.receive_weights(version=1, timeout_s=1.0, is_part=False).error == "RuntimeError: asked"
    assert asked["transports"].identify(torch.device("cuda", 0)) == ""


def test_a_worker_that_is_a_process_of_its_own_ends_with_its_server(monkeypatch):
    called = []
    monkeypatch.setattr(worker_extension, "end_with_parent", lambda: called.append("ends with its parent"))
    base = worker_extension.CustomPipelineWorkerExtension
    monkeypatch.setattr(base, "re_init_pipeline", lambda _self, arguments: called.append(arguments))
    DiffusionWorkerExtension().re_init_pipeline({"a": 1})
    assert called == ["ends with its parent", {"a": 1}]
