"""One real engine for all tests of this folder that ask for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from omegaconf import DictConfig

    from partial_rollout.rollout.client import ResumingLLMServerClient
    from partial_rollout.rollout.replica import PartialRolloutReplica


@dataclass
class EngineUnderTest:
    """A running replica, a client for it, what it was built from, and what it generated with these weights."""

    replica: PartialRolloutReplica
    client: ResumingLLMServerClient
    config: DictConfig
    model_path: Path
    fresh: list[tuple[list[int], list[float]]]
    """Tokens and log-probs of `support.probe`."""


@pytest.fixture(scope="session")
def engine_cluster(ray_cluster: Any) -> None:
    """The session's Ray cluster, able to run the actors of tests/engine/support.py."""
    from tests.engine import support

    # Actor processes cannot import the tests.
    ray_cluster.cloudpickle.register_pickle_by_value(support)


@pytest.fixture(scope="session")
def engine(engine_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
    """Real replica with a tiny tied-embedding model."""
    from tests.engine import support

    path = tmp_path_factory.mktemp("tied")
    support.make_model(path, seed=0)
    yield from run_engine(path, support.make_config(path))


def run_engine(path: Path, config: DictConfig, replica_rank: int = 0) -> Iterator[EngineUnderTest]:
    """Start a replica, let it answer, hand it out, end it."""
    from partial_rollout.rollout.client import ResumingLLMServerClient
    from tests.engine import support

    replica = asyncio.run(support.launch(config, replica_rank))
    client = ResumingLLMServerClient(config, support.make_router(replica))
    yield EngineUnderTest(replica, client, config, path, asyncio.run(support.probe(client)))
    asyncio.run(replica.shutdown())
