"""Starts the parts of an image job (Ray, the servers, the training model) and ends them."""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from huggingface_hub import snapshot_download
from ray.exceptions import RayError
from transformers import Qwen2Tokenizer

from partial_rollout.diffusion.actor import FlowGrpoActor
from partial_rollout.diffusion.checkpoint import Checkpoints
from partial_rollout.diffusion.config import MAX_STEPS
from partial_rollout.diffusion.contract import resolve
from partial_rollout.diffusion.job import DiffusionJob, read_prompts
from partial_rollout.diffusion.replicas import Replicas
from partial_rollout.diffusion.resources import CPUS_PER_SERVER, require_resources, reserve_gpu
from partial_rollout.diffusion.sampling import SamplingLimits
from partial_rollout.diffusion.server import DiffusionServer, ServerOptions
from partial_rollout.errors import ConfigError
from partial_rollout.runtime.remote_call import wait_for_all
from partial_rollout.runtime.termination import heed_termination

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from partial_rollout.diffusion.config import DiffusionConfig
    from partial_rollout.diffusion.contract import Adapter
    from partial_rollout.observability.events import EventWriter

MAX_CONCURRENCY = 10_000
"""Calls that one server runs at the same time: all its requests, and control calls, which must never queue behind."""
CONTROL_TIMEOUT_S = 120.0
END_SHARE = 0.2
"""Share of `trainer.stop_s` for the end of the servers."""

logger = logging.getLogger(__name__)


@contextmanager
def launched(config: DiffusionConfig, events: EventWriter | None = None) -> Iterator[DiffusionJob]:
    """A job whose servers run; on exit they are ended. `events`: where it says what happens.

    Raises:
        ConfigError: the algorithm, the reward, a file of the model or a resource of the cluster is missing, the model
            cannot make images of this size, or the checkpoint to go on from is of a run with other settings.
        DataError: there are no prompts, or no checkpoint in the folder is whole.
    """
    reward, prompts = load_function(config.trainer.reward), read_prompts(config.data.prompts)
    adapter = resolve(config.model.architecture, config.algorithm.name, step_execution=config.rollout.step_execution)
    config.algorithm.check_window(is_shared=adapter.shares_window)
    folder = Path(config.model.path)
    if not folder.is_dir():
        folder = Path(snapshot_download(config.model.path))
    patch = pixels_per_token(folder)
    config.check_sizes(patch)
    checkpoints = Checkpoints(config, prompts)
    started_here = not ray.is_initialized()
    if started_here:
        ray.init(include_dashboard=False, log_to_driver=False)
        heed_termination()
    servers: list[Any] = []
    reservation = replicas = None
    try:
        require_resources(config, ray.cluster_resources(), _resources_here())
        device = torch.device(config.actor.device)
        if device.type == "cuda":
            reservation, device = reserve_gpu(CONTROL_TIMEOUT_S)
        replicas = _replicas(config, servers, _server_options(config, adapter, patch))
        actor = FlowGrpoActor(config, patch, device)
        checkpoints.restore(actor)
        yield DiffusionJob(
            config,
            adapter=adapter,
            replicas=replicas,
            actor=actor,
            tokenizer=Qwen2Tokenizer.from_pretrained(folder / "tokenizer"),
            prompts=prompts,
            reward=reward,
            checkpoints=checkpoints,
            events=events,
        )
    finally:
        _stop(servers, END_SHARE * config.trainer.stop_s, ray.kill if replicas is None else replicas.kill)
        if reservation is not None:
            ray.kill(reservation)
        if started_here:
            ray.shutdown()


def load_function(path: str) -> Any:
    """Import the function at the path `package.module.function`.

    Raises:
        ConfigError: there is no such function.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"trainer.reward={path!r} cannot be imported ({error}): must be the import path of a function"
        ) from error


def pixels_per_token(folder: Path) -> int:
    """Pixels along the side of one latent token: 2 for each time the VAE halves the image, times the patch of 2.

    Raises:
        ConfigError: the folder has no VAE.
    """
    path = folder / "vae" / "config.json"
    try:
        vae = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"model.path={str(folder)!r}: {path} cannot be read ({error}); must be a pipeline in diffusers' format"
        ) from error
    return 2 ** len(vae["temperal_downsample"]) * 2


def _resources_here() -> dict[str, float]:
    """Resources of the node that this process runs on."""
    here = ray.get_runtime_context().get_node_id()
    return next((node["Resources"] for node in ray.nodes() if node["NodeID"] == here), {})


def _replicas(config: DiffusionConfig, servers: list[Any], options: ServerOptions) -> Replicas:
    """Replicas whose servers run; `servers` has their handles from their creation on, also of one that starts again."""
    servers += [_create_server(config, options) for _ in range(config.rollout.num_servers)]

    def start(index: int) -> Any:
        servers[index] = _create_server(config, options)
        return servers[index]

    wait_for_all(
        [server.statistics.remote() for server in servers],
        timeout_s=config.trainer.timeout_s,
        who_waits="the job for its servers to start",
    )
    return Replicas(
        servers,
        workers_per_server=1,
        timeout_s=CONTROL_TIMEOUT_S,
        sample_timeout_s=config.rollout.timeout_s,
        stall_s=config.rollout.stall_s,
        start=start,
        start_s=config.trainer.timeout_s,
    )


def _server_options(config: DiffusionConfig, adapter: Adapter, patch: int) -> ServerOptions:
    rollout = config.rollout
    return ServerOptions(
        model_path=config.model.path,
        adapter=adapter,
        limits=SamplingLimits(sizes=((rollout.height, rollout.width),), multiple=patch, max_steps=MAX_STEPS),
        dtype=config.model.dtype,
        max_num_seqs=rollout.max_num_seqs,
    )


def _create_server(config: DiffusionConfig, options: ServerOptions) -> Any:
    """Create a server actor; it is still starting."""
    actor_class: Any = ray.remote(DiffusionServer).options(
        num_cpus=CPUS_PER_SERVER, num_gpus=config.rollout.gpus_per_server, max_concurrency=MAX_CONCURRENCY
    )
    return actor_class.remote(options)


def _stop(servers: list[Any], limit_s: float, kill: Callable[[Any], None]) -> None:
    """End the servers in order; those that are late or dead are killed with their engines."""
    ended = {server.shutdown.remote(): server for server in servers}
    done = ray.wait(list(ended), num_returns=len(ended), timeout=limit_s)[0] if ended else []
    for ref in done:
        try:
            ray.get(ref)
        except RayError as error:
            logger.warning("an image server did not shut down in order: %s", error)
    for ref, server in ended.items():
        (ray.kill if ref in done else kill)(server)
