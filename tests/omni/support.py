"""A server on the tiny checkpoint, in the test's own process, and what tests compare with."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import TYPE_CHECKING, Any

import torch
from diffusers import QwenImageTransformer2DModel
from transformers import Qwen2Tokenizer

from partial_rollout.diffusion.contract import QWEN_IMAGE, channel_name, resolve
from partial_rollout.diffusion.job import to_ids
from partial_rollout.diffusion.policy import log_probs, steps_of
from partial_rollout.diffusion.sampling import SampleRequest, SamplingLimits
from partial_rollout.diffusion.sde_window import SdeWindow
from partial_rollout.diffusion.server import DiffusionServer, ServerOptions
from partial_rollout.weights.sender import WeightSender
from tests.omni.stepping_engine import SCRIPT

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

    from partial_rollout.diffusion.result import SampleResult

CALL_S = 120.0
NUM_STEPS = 10
NOISE_LEVEL = 0.7
PATCH = 8


class Rig:
    """One server and the event loop it lives on."""

    def __init__(self, model: Path, **changes: Any) -> None:
        self.tokenizer = Qwen2Tokenizer.from_pretrained(model / "tokenizer")
        self.model = model
        self.loop = asyncio.new_event_loop()
        self.server: DiffusionServer = self.run(self._start(changes))

    async def _start(self, changes: dict[str, Any]) -> DiffusionServer:
        return DiffusionServer(options(self.model, **changes))

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(call, CALL_S))

    def request(self, name: str, *, prompt: str = "a red square", **changes: Any) -> SampleRequest:
        ids = to_ids(self.tokenizer, prompt)
        if changes.pop("guided", False):
            changes |= {"negative_ids": to_ids(self.tokenizer, " "), "true_cfg_scale": 4.0}
        given = {"seed": sum(name.encode()), "height": 64, "width": 64, "num_steps": NUM_STEPS}
        given |= {"window": SdeWindow(0, NUM_STEPS), "noise_level": NOISE_LEVEL}
        return SampleRequest(request_id=name, prompt_ids=ids, **(given | changes))

    def generate(self, *requests: SampleRequest) -> list[Any]:
        async def all_of_them():
            return await asyncio.gather(*(self.server.generate(request) for request in requests))

        return self.run(all_of_them())

    def count_steps(self) -> int:
        """Denoise steps that the engine has computed until now."""
        return self.run(self.server.count_steps())

    def generate_scripted(self, *requests: SampleRequest, joins: dict[str, int] | None = None) -> list[Any]:
        """All requests reach the engine before the first step, and join the batch at the cycle that `joins` says."""

        async def scripted():
            tasks = await self.begin(*requests, joins=joins)
            await self.server.release("test")
            return await asyncio.gather(*tasks)

        return self.run(scripted())

    async def begin(self, *requests: SampleRequest, hold_after: int | None = None, joins: dict[str, int] | None = None):
        """Bring requests to the held engine; return their tasks."""
        await self.server.hold("test")
        SCRIPT.begin(joins=joins, hold_after=hold_after)
        tasks = [asyncio.ensure_future(self.server.generate(request)) for request in requests]
        await asyncio.sleep(0)  # the gate is open: every task is inside when it has run once
        await self.server._admission.all_arrived()
        return tasks

    async def stop_after(self, *requests: SampleRequest, cycles: int):
        """Run so many cycles of these requests and no further; return their tasks."""
        tasks = await self.begin(*requests, hold_after=cycles)
        await self.server.release("test")
        await self.stopped()
        return tasks

    async def stopped(self) -> None:
        """Wait until the engine holds by itself."""
        await asyncio.get_running_loop().run_in_executor(None, SCRIPT.held.wait, CALL_S)

    async def update(
        self, transformer: QwenImageTransformer2DModel, *, leave_out: str | None = None, is_part: bool = False
    ) -> int:
        """Send a transformer's weights as the next version."""
        weights = transformer.state_dict()
        return await self.send([(name, weights[name]) for name in weights if name != leave_out], is_part=is_part)

    async def send(self, weights: list[tuple[str, torch.Tensor]], *, is_part: bool) -> int:
        """Send these weights as the next version."""
        version = self.server.statistics().version + 1
        failures: list[Exception] = []

        def send() -> None:
            try:
                sender.send(weights)
            except Exception as error:  # noqa: BLE001 - raised by the test's thread
                failures.append(error)

        with WeightSender(
            self.server.weight_channel(), channel_name(0), update_number=version, timeout_s=CALL_S, check=lambda: None
        ) as sender:
            thread = threading.Thread(target=send)
            thread.start()
            try:
                await self.server.receive_weights(version, CALL_S, is_part=is_part)
            finally:
                await asyncio.get_running_loop().run_in_executor(None, thread.join, CALL_S)
        if failures:
            raise failures[0]
        return version

    def close(self) -> None:
        self.server.shutdown()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


def options(model: Path, *, step_execution: bool, max_num_seqs: int = 4, **changes: Any) -> ServerOptions:
    given = ServerOptions(
        model_path=str(model),
        adapter=resolve(QWEN_IMAGE, "flow_grpo", step_execution=step_execution),
        limits=SamplingLimits(sizes=((64, 64), (32, 64)), multiple=PATCH, max_steps=50),
        dtype="float32",
        max_num_seqs=max_num_seqs,
        engine_backend="tests.omni.stepping_engine.SteppingEngine",
    )
    return dataclasses.replace(given, **changes)


def training_model(model: Path, *, noise: float = 0.0, seed: int = 1) -> QwenImageTransformer2DModel:
    """The checkpoint's transformer in diffusers, with every weight moved by `noise` times a normal draw."""
    transformer = QwenImageTransformer2DModel.from_pretrained(model, subfolder="transformer")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return transformer


def adapted_part(model: Path) -> dict[str, torch.Tensor]:
    """The weights of layers that can have adapters, moved."""
    moved = training_model(model, noise=0.05).state_dict()
    return {name: moved[name] for name in moved if ".attn." in name and ".norm_" not in name}


def recomputed(
    transformer: torch.nn.Module, result: SampleResult, true_cfg_scale: float = 1.0, sde_type: str = "sde"
) -> torch.Tensor:
    """Log-probs [K] of a trajectory by the training model, step by step as the rollout took them."""
    batch = steps_of([result], patch=PATCH, noise_level=NOISE_LEVEL, sde_type=sde_type, true_cfg_scale=true_cfg_scale)
    with torch.no_grad():
        return torch.cat([log_probs(transformer, batch.rows(row, row + 1)) for row in range(len(batch))])


def first_difference(one: torch.Tensor, other: torch.Tensor) -> int | None:
    """Index of the first latents that differ, along dimension 0."""
    different = [index for index in range(len(one)) if not torch.equal(one[index], other[index])]
    return different[0] if different else None
