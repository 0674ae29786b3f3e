"""An AsyncOmni without an engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import torch

from partial_rollout.diffusion.engine import BOUNDARY, HOLD
from partial_rollout.diffusion.sample import OPTIONS_KEY, Sample
from partial_rollout.diffusion.server import FORGET, PACK
from partial_rollout.diffusion.snapshot import SampleState, pack
from partial_rollout.diffusion.worker_extension import Report

TRAJECTORY = {
    "final": torch.zeros(1, 2, 4),
    "window": (0, 0),
    "latents": None,
    "log_probs": None,
    "timesteps": None,
    "sigmas": torch.tensor([1.0, 0.0]),
    "versions": [0],
    "prompt_embeds": torch.zeros(1, 1, 1),
}


class FakeOmni:
    """Requests reach it when they are let in, as they reach an engine through queues, and end when they are told to."""

    instance: FakeOmni

    def __init__(self, **_):
        FakeOmni.instance = self
        self.queues, self.params, self.calls, self.begun = {}, {}, [], set()
        self.num_steps, self.update_error, self.is_shut_down = 0, None, False
        self.unanswered, self.aborted, self.ack_error, self.death = [], [], None, None
        self.sent = asyncio.Queue()

    async def generate(self, prompt, params, name):
        self.queues[name], self.params[name] = asyncio.Queue(), params
        self.sent.put_nowait(name)
        yield await self.queues[name].get()

    def let_in(self, name):
        self.params[name].extra_args[OPTIONS_KEY].on_arrival(lambda: self.aborted.append(name))

    async def collective_rpc(self, method, timeout, kwargs):
        self.calls.append(method)
        answer = self.answer(method, kwargs)
        self.lose(method)
        return [answer]

    def lose(self, method):
        if self.death is not None:
            raise RuntimeError(self.death)
        if method in self.unanswered:
            self.unanswered.remove(method)
            raise TimeoutError("collective_rpc timed out")

    def answer(self, method, kwargs):
        if method == HOLD:
            unstarted = sorted(set(self.queues) - self.begun - self.finished)
            return {"unstarted": unstarted, "num_denoise_steps": self.num_steps}
        if method == BOUNDARY:
            return [self.num_steps]
        if method == PACK:
            return [Report(value={name: self.snapshot(name) for name in self.begun - self.finished})]
        if method == FORGET:
            self.begun -= set(kwargs["names"])
        if method == "receive_weights":
            return [Report(value=kwargs["version"], error=self.update_error)]
        return None

    @property
    def finished(self):
        return {name for name, queue in self.queues.items() if not queue.empty()}

    async def sleep(self, level):
        return self.acknowledge(f"sleep {level}")

    async def wake_up(self):
        return self.acknowledge("wake_up")

    def acknowledge(self, call):
        self.calls.append(call)
        self.lose(call)
        return [SimpleNamespace(status="ERROR" if self.ack_error else "SUCCESS", error_msg=self.ack_error)]

    def fail(self, name):
        self.queues[name].put_nowait(SimpleNamespace(images=[], multimodal_output={}))

    def finish(self, name):
        output = SimpleNamespace(images=[np.zeros((8, 8, 3))], multimodal_output={"trajectory": TRAJECTORY})
        self.queues[name].put_nowait(output)

    def snapshot(self, name):
        sample = Sample(self.params[name].extra_args[OPTIONS_KEY], torch.Generator())
        return pack(SampleState(sample, 2, 8, 8, False, 1.0, {"timesteps": torch.zeros(3)}))

    def shutdown(self):
        self.is_shut_down = True
