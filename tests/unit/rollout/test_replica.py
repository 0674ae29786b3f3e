"""A replica over two nodes: only the first server has an engine's requests, all of them sleep."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("vllm")

from verl.workers.rollout.replica import RolloutMode, RolloutReplicaRegistry, get_rollout_replica_class

from partial_rollout.errors import WaitTimeout
from partial_rollout.rollout import replica as module
from partial_rollout.rollout.replica import PartialRolloutReplica, register_replicas
from partial_rollout.settings.block import PartialRolloutConfig, TimeoutConfig


@dataclass
class Server:
    """An actor handle whose methods answer when `answers` says so."""

    answers: bool = True
    calls: list[str] = field(default_factory=list)

    def __getattr__(self, method: str) -> Any:
        async def answer() -> str:
            if not self.answers:
                await asyncio.Event().wait()
            return method

        def remote(**kwargs: Any) -> Any:
            self.calls.append(method)
            return answer()

        return type("Method", (), {"remote": staticmethod(remote)})


def replica(*servers: Server, **timeouts: float) -> PartialRolloutReplica:
    made = object.__new__(PartialRolloutReplica)  # its constructor reads a whole verl configuration
    made.settings = PartialRolloutConfig(timeouts=TimeoutConfig(**timeouts))
    made.servers, made.replica_rank, made.rollout_mode = list(servers), 3, RolloutMode.HYBRID
    return made


async def test_a_further_node_is_not_asked_for_requests_it_cannot_have():
    first, second = Server(), Server()
    await replica(first, second).sleep()
    assert first.calls == ["wait_for_requests_to_drain", "sleep"]
    assert second.calls == ["sleep"]


async def test_an_engine_with_devices_of_its_own_keeps_its_memory():
    server = Server()
    made = replica(server)
    made.rollout_mode = RolloutMode.STANDALONE
    await made.sleep()
    assert server.calls == []


async def test_a_server_that_does_not_answer_is_named_with_its_replica():
    with pytest.raises(WaitTimeout, match=r"replica 3: resume_engine_generation .* by all 2 server"):
        await replica(Server(), Server(answers=False), resume_s=0.01).resume_generation()


@pytest.mark.parametrize("enabled", [True, False])
def test_engines_of_a_reward_model_or_a_teacher_are_verls_own(monkeypatch: pytest.MonkeyPatch, enabled: bool):
    monkeypatch.setattr(RolloutReplicaRegistry, "_registry", dict(RolloutReplicaRegistry._registry))
    made: list[str] = []
    for name in ("PartialRolloutReplica", "CpuReplica", "vLLMReplica"):
        monkeypatch.setattr(module, name, lambda *_, name=name, **__: made.append(name))
    monkeypatch.setattr(module, "get_device_name", lambda: "cpu")
    register_replicas(partial_rollout=enabled)
    create = get_rollout_replica_class("vllm")
    for which in ({}, {"is_reward_model": True}, {"is_teacher_model": True}):
        create(replica_rank=0, config={}, model_config={}, **which)
    assert made == ["PartialRolloutReplica" if enabled else "CpuReplica", "CpuReplica", "CpuReplica"]
