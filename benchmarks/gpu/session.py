"""Ray, TransferQueue and one of our engines, for many blocks of steps with different settings."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import ray
import transfer_queue as tq
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from ray.exceptions import RayError
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.workers.rollout.llm_server import LLMServerManager

import partial_rollout
from benchmarks.gpu.inputs import SHAPES, Shape, write_model, write_prompts
from partial_rollout.agent_loop.manager import PartialRolloutAgentLoopManager
from partial_rollout.core.engine_meter import EngineMeter
from partial_rollout.core.interrupt import MODES
from partial_rollout.rollout.interruption import EVERY_TOKEN
from partial_rollout.rollout.replica import register_replicas
from partial_rollout.settings.block import PartialRolloutConfig
from partial_rollout.settings.mode import apply_mode, check_config
from partial_rollout.train.shutdown import shutdown_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from omegaconf import DictConfig

    from benchmarks.bench_rollout import Workload
    from benchmarks.gpu.trainer import Record, RolloutTrainer
    from partial_rollout.rollout.replica import PartialRolloutReplica
    from partial_rollout.rollout.statistics import RolloutStatistics
    from partial_rollout.train.shutdown import Run

logger = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[2]
CONFIGS = str(Path(partial_rollout.__file__).resolve().parent / "configs")
ROLLOUT = "actor_rollout_ref.rollout"
LOGICAL_CPUS = 64
CALL_S = 60.0
PARTITION = "train"
MOST_STEPS = 1000
"""More than a block ever has."""


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is started with."""

    shape: str = "8b"
    slots: int = 512
    """Sequences that it runs at the same time, at most."""
    prompt_tokens: int = 256
    response_tokens: int = 4096
    eager: bool = False
    memory: float = 0.88
    batched_tokens: int = 8192
    num_workers: int = 1
    """Agent-loop workers; each may leave up to a group less one of its slots free."""
    tensor_parallel: int = 1

    @property
    def is_tiny(self) -> bool:
        """Whether it is the model for a CPU."""
        return self.shape == "tiny"

    @property
    def sizes(self) -> Shape:
        """Of the model."""
        return SHAPES[self.shape]

    @property
    def context(self) -> int:
        """Longest prompt and response."""
        return self.prompt_tokens + self.response_tokens


def overrides(options: EngineOptions, load: Workload, folder: Path) -> dict[str, Any]:
    """Settings that all blocks of a session share."""
    common = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "prompts.parquet",
        "data.val_files": folder / "prompts.parquet",
        "data.shuffle": False,
        "data.filter_overlong_prompts": False,
        "data.dataloader_num_workers": 0,
        "data.train_batch_size": load.batch,
        "data.max_prompt_length": options.prompt_tokens,
        "data.max_response_length": options.response_tokens,
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.actor.ppo_mini_batch_size": load.batch,
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.model.use_remove_padding": False,
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.n": load.group,
        f"{ROLLOUT}.load_format": "dummy",
        f"{ROLLOUT}.calculate_log_probs": True,
        f"{ROLLOUT}.free_cache_engine": False,
        f"{ROLLOUT}.disable_log_stats": False,
        f"{ROLLOUT}.enforce_eager": options.eager or options.is_tiny,
        f"{ROLLOUT}.gpu_memory_utilization": options.memory,
        f"{ROLLOUT}.max_num_seqs": options.slots,
        f"{ROLLOUT}.max_model_len": options.context,
        f"{ROLLOUT}.max_num_batched_tokens": max(options.batched_tokens, options.slots),
        f"{ROLLOUT}.tensor_model_parallel_size": options.tensor_parallel,
        f"{ROLLOUT}.agent.num_workers": options.num_workers,
        f"{ROLLOUT}.agent.agent_loop_config_path": ROOT / "benchmarks" / "trace_agent.yaml",
        "partial_rollout.packing.planner": "verl",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "trainer.n_gpus_per_node": options.tensor_parallel,
        "trainer.logger": "[]",
        "trainer.val_before_train": False,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": folder / "checkpoints",
    }
    return common | (_ON_A_CPU if options.is_tiny else {})


_ON_A_CPU = {
    "trainer.device": "cpu",
    f"{ROLLOUT}.dtype": "float32",
    f"+{ROLLOUT}.enable_sleep_mode": False,
    f"+{ROLLOUT}.engine_kwargs.vllm.block_size": 32,
}


def composed(settings: Mapping[str, Any]) -> DictConfig:
    """Our configuration with the flag, checked and applied as `main_ppo` does."""
    words = [f"{key}={'null' if value is None else value}" for key, value in settings.items()]
    with initialize_config_dir(CONFIGS, version_base=None):
        config = compose("partial_rollout", overrides=[*words, "+async_training.partial_rollout=True"])
    check_config(config)
    apply_mode(config)
    config.transfer_queue.enable = True
    OmegaConf.resolve(config)
    return config


@dataclass(frozen=True)
class BlockPlan:
    """A block of steps."""

    trainer: type[RolloutTrainer]
    settings: Mapping[str, Any]
    prompts: Path
    batch_s: float
    """Longest wait for a batch."""
    on_step: Callable[[int, Record], bool]


@dataclass(frozen=True)
class ReadyBlock:
    """A block whose workers have started."""

    trainer: RolloutTrainer
    agent_loops: PartialRolloutAgentLoopManager


class DeviceHolder:
    """Stands where a training worker would, and holds the GPU that the replica asks for."""


@dataclass
class Session:
    """One engine, and blocks of steps on it; a context manager."""

    options: EngineOptions
    load: Workload
    """Its batch and group size are those of all blocks."""
    folder: Path
    started_s: float = field(default_factory=time.monotonic)
    startup_s: float = 0.0
    _ends: list[tuple[str, Callable[[], object]]] = field(default_factory=list)
    """What has started, last first."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __enter__(self) -> Session:
        """Start everything; what has started ends if something does not."""
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        self.tokenizer = write_model(self.folder / "model", self.options.sizes, self.options.context)
        self.prompts(self.load, self.load.batch)
        self.config = composed(overrides(self.options, self.load, self.folder))
        environment = get_ppo_ray_runtime_env(self.config)
        environment.setdefault("env_vars", {})["TRANSFER_QUEUE_ENABLE"] = "1"
        logical: dict[str, Any] = {"num_gpus": self.options.tensor_parallel} if self.options.is_tiny else {}
        ray.init(num_cpus=LOGICAL_CPUS, include_dashboard=False, runtime_env=environment, **logical)
        tq.init(self.config.transfer_queue)
        self._ends.insert(0, ("TransferQueue", tq.close))
        register_replicas(partial_rollout=True)
        # verl's `auto_await`: its annotations say coroutine, and it blocks.
        self.servers = cast(
            "LLMServerManager", LLMServerManager.create(config=self.config, worker_group=self._holders())
        )
        self._ends.insert(0, ("the engine", lambda: asyncio.run(self.replica.shutdown())))
        self.startup_s = time.monotonic() - self.started_s

    def __exit__(self, *_: object) -> None:
        """End everything; what fails here must not hide the error that ended the run."""
        for name, end in self._ends:
            try:
                end()
            except (RayError, OSError, RuntimeError) as error:
                logger.warning("%s did not end in order: %s", name, error)
        self._ends.clear()
        ray.shutdown()

    def _holders(self) -> Any:
        holder: Any = ray.remote(num_cpus=0, num_gpus=1)(DeviceHolder)
        workers = [holder.remote() for _ in range(self.options.tensor_parallel)]
        return SimpleNamespace(workers=workers, world_size=len(workers))

    @property
    def replica(self) -> PartialRolloutReplica:
        """The only one."""
        return cast("PartialRolloutReplica", self.servers.get_replicas()[0])

    def prompts(self, load: Workload, num: int, name: str = "prompts") -> Path:
        """A file of this name with the primer and `num` prompts."""
        path = self.folder / f"{name}.parquet"
        write_prompts(path, load, self.tokenizer, self.options.prompt_tokens, num)
        return path

    def statistics(self) -> RolloutStatistics:
        """The server's counts."""
        return ray.get(self.replica.server_handle.rollout_statistics.remote(), timeout=CALL_S)

    def on_server(self, change: Callable[[Any], Any]) -> Any:
        """Call something with the server in its own process."""
        return ray.get(self.replica.server_handle.__ray_call__.remote(change), timeout=CALL_S)

    def prepare(self, interrupt_mode: str) -> None:
        """Let the idle engine interrupt in this mode, hand over tokens as it does in this mode, and measure afresh."""
        mode = MODES[interrupt_mode]
        interval = EVERY_TOKEN if mode.stays else PartialRolloutConfig().stream_interval

        def change(server: Any) -> None:
            server._interruption.mode = server.engine._mode = mode
            server.engine.output_processor.stream_interval = interval
            server._meter = server.engine._meter = EngineMeter()

        self.on_server(change)

    def kv_tokens(self) -> int | None:
        """Tokens that the engine's KV cache has room for."""

        def size(server: Any) -> int | None:
            cache = server.engine.vllm_config.cache_config
            blocks = cache.num_gpu_blocks
            return None if blocks is None else blocks * cache.block_size

        return self.on_server(size)

    def ready(self, plans: Sequence[BlockPlan]) -> list[ReadyBlock]:
        """Everything that blocks need, made at the same time: a worker's imports take as long as some steps."""
        trainers = [self._trainer(plan) for plan in plans]

        def workers(trainer: RolloutTrainer) -> PartialRolloutAgentLoopManager:
            client = trainer.get_llm_client()
            made = PartialRolloutAgentLoopManager.create(config=trainer.config, llm_client=client)
            return cast("PartialRolloutAgentLoopManager", made)

        with ThreadPoolExecutor(max(1, len(trainers))) as pool:
            return [ReadyBlock(*each) for each in zip(trainers, pool.map(workers, trainers), strict=True)]

    def _trainer(self, plan: BlockPlan) -> RolloutTrainer:
        settings = {
            **overrides(self.options, self.load, self.folder),
            "data.train_files": plan.prompts,
            "partial_rollout.manager.name": f"gpu-benchmark-{os.getpid()}-{next(self._numbers)}",
            "partial_rollout.timeouts.batch_s": plan.batch_s,
            "trainer.total_training_steps": MOST_STEPS,
            **plan.settings,
        }
        trainer = plan.trainer(composed(settings), self.servers, plan.on_step)
        trainer.init()
        return trainer

    def run(self, block: ReadyBlock) -> None:
        """Steps from an empty queue until `on_step` has enough; the engine is empty afterwards, whatever happened."""
        self.prepare(block.trainer.settings.tail.interrupt_mode)
        block.trainer.start_anew()
        try:
            block.trainer.fit(block.agent_loops)
        finally:
            self._forget_rows()

    def discard(self, block: ReadyBlock) -> None:
        """End what a block has that will not run."""
        block.trainer.agent_loop_manager = block.agent_loops
        shutdown_run(cast("Run", block.trainer))

    def _forget_rows(self) -> None:
        rows = tq.kv_list(PARTITION) or {}
        keys = list(rows.get(PARTITION, {}))
        if keys:
            tq.kv_clear(keys=keys, partition_id=PARTITION)
