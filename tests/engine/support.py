"""A tiny real model and a real replica of ours around it, without verl's training workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import psutil
import ray
import torch
from hydra import compose, initialize_config_module
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.router import get_router_handle
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

from partial_rollout.core.interrupt import MODES
from partial_rollout.errors import WeightUpdateError
from partial_rollout.rollout.replica import PartialRolloutReplica
from partial_rollout.settings.block import PartialRolloutConfig
from partial_rollout.weights.adapter import ChannelAdapter
from partial_rollout.weights.directory import SHARED_MEMORY, owned_prefix
from partial_rollout.weights.sender import WeightSender

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from concurrent.futures import Future
    from pathlib import Path

    from omegaconf import DictConfig
    from ray import ObjectRef

    from partial_rollout.rollout.client import ResumingLLMServerClient
    from partial_rollout.rollout.engine_process import RolloutStatistics

T = TypeVar("T")
VOCAB_SIZE = 64
EOS_ID = 1
MAX_MODEL_LEN = 512
BLOCK_SIZE = 32
"""Smallest that vLLM's CPU attention likes; with its default of 128 no sequence here would fill a cached block."""
BUFFER_BYTES = 64 << 10
"""Smaller than most tensors of the model, so that they are split, and far smaller than an engine layer."""
CALL_S = 120.0
MOST_TRIES = 8
UNTIL_S = 120.0
SILENCE_S = 16.0
"""What an engine's worker bears of its sender; a rank bears half of it."""
PROBES = ([11, 12, 13, 14], [20, 3, 9], [3 + i % 60 for i in range(140)])
"""Prompts; the last fills several blocks of the prefix cache, also at vLLM's default block size of 128."""
NUM_PROBE_TOKENS = 32
ANY_CALL = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""Environment of an engine whose workers take functions."""
NUM_LOGICAL_GPUS = 0.25
"""Share of the session's one logical GPU, so that several replicas fit."""


def make_model(path: Path, *, seed: int, tied: bool = True) -> Qwen3ForCausalLM:
    """Write a random Qwen3 with a character tokenizer of the same vocabulary to `path`."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        # Makes the weights larger than one transfer bucket of 1 MiB, the smallest there is.
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=tied,
        eos_token_id=EOS_ID,
        bos_token_id=0,
        pad_token_id=0,
        # Wide enough that greedy choices are not near-ties which rounding could flip.
        initializer_range=0.3,
    )
    model = Qwen3ForCausalLM(config).float().eval()
    model.save_pretrained(path)
    vocab = {"<pad>": 0, "<eos>": EOS_ID, "<unk>": 2} | {chr(0x40 + i): i for i in range(3, VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(path)
    return model


def make_config(model_path: Path, **overrides: Any) -> DictConfig:
    """Compose verl's own configuration for a CPU rollout."""
    rollout = "actor_rollout_ref.rollout"
    settings = {
        f"{rollout}.name": "vllm",
        f"{rollout}.dtype": "float32",
        f"{rollout}.load_format": "auto",
        f"{rollout}.enforce_eager": True,
        f"{rollout}.free_cache_engine": False,
        f"{rollout}.prompt_length": 64,
        f"{rollout}.response_length": 128,
        f"{rollout}.max_model_len": MAX_MODEL_LEN,
        f"{rollout}.max_num_batched_tokens": 512,
        f"{rollout}.max_num_seqs": 16,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.n_gpus_per_node": 1,
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes": 1,
        f"+{rollout}.enable_sleep_mode": False,
        f"+{rollout}.engine_kwargs.vllm.block_size": BLOCK_SIZE,
        f"+{rollout}.custom.partial_rollout.timeouts.resume_s": 10 * SILENCE_S,
        "actor_rollout_ref.model.path": str(model_path),
        **overrides,
    }
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[f"{key}={value}" for key, value in settings.items()])


class FusedWorker:
    """Stands where verl's training worker would: holds the logical GPU the replica asks for."""


async def launch(config: DictConfig, replica_rank: int = 0) -> PartialRolloutReplica:
    """Start one replica the way verl's `init_hybrid` does."""
    replica = PartialRolloutReplica(
        replica_rank=replica_rank,
        config=config.actor_rollout_ref.rollout,
        model_config=config.actor_rollout_ref.model,
        gpus_per_node=config.actor_rollout_ref.rollout.tensor_model_parallel_size,
    )
    replica.rollout_mode = RolloutMode.HYBRID
    worker = ray.remote(num_cpus=0, num_gpus=NUM_LOGICAL_GPUS)(FusedWorker)
    replica.workers = [worker.remote() for _ in range(replica.world_size)]
    await replica.launch_servers()
    return replica


def make_router(replica: PartialRolloutReplica) -> Any:
    """verl's load balancer over this one replica."""
    return get_router_handle(servers={replica.server_address: replica.server_handle})


def http_status(address: str, path: str, key: str | None = None) -> int:
    """What an engine's HTTP server answers; 0: nobody listens."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        with urlopen(Request(f"http://{address}{path}", headers=headers), timeout=CALL_S) as answer:
            return answer.status
    except HTTPError as refusal:
        return refusal.code
    except URLError:
        return 0


async def until(replica: PartialRolloutReplica, condition: Callable[[RolloutStatistics], bool]) -> RolloutStatistics:
    """Ask the server until the condition holds; `TimeoutError` after `UNTIL_S`."""
    async with asyncio.timeout(UNTIL_S):
        while True:
            statistics = (await replica.statistics())[0]
            if condition(statistics):
                return statistics


class DraftCounts(NamedTuple):
    """vLLM's counts since a server's start: steps of a request with drafts, and drafts that were right."""

    drafts: int
    accepted: int

    def __sub__(self, before: DraftCounts) -> DraftCounts:
        return DraftCounts(self.drafts - before.drafts, self.accepted - before.accepted)


async def count_drafts(replica: PartialRolloutReplica) -> DraftCounts:
    """The counts of an engine that was started with `disable_log_stats=false`."""

    def ask(_server: Any) -> DraftCounts:
        from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

        found = {each.name: each.value for each in get_metrics_snapshot() if isinstance(each, Counter)}
        return DraftCounts(found["vllm:spec_decode_num_drafts"], found["vllm:spec_decode_num_accepted_tokens"])

    return await replica.server_handle.__ray_call__.remote(ask)


async def mend_sampling(replica: PartialRolloutReplica) -> None:
    """Let an engine on a CPU check drafts at a temperature (vLLM 0.28, issue 55005).

    There the temperatures of drafts are uninitialized memory: `expand_kernel` drops its result. The server must have
    been started with ANY_CALL.
    """

    def mend(_worker: Any) -> None:
        from vllm.v1.sample import rejection_sampler

        def expand(
            x: torch.Tensor, ends: torch.Tensor, _num: int, replace_from: int = 0, replace_to: int = 0
        ) -> torch.Tensor:
            repeats = torch.diff(ends, prepend=ends.new_zeros(1))
            return torch.where(x == replace_from, replace_to, x).repeat_interleave(repeats)

        rejection_sampler.expand_batch_to_tokens = expand

    await replica.server_handle.collective_rpc.remote(mend)


async def send_weights(
    replica: PartialRolloutReplica, model: Qwen3ForCausalLM, version: int, names: list[str] | None = None
) -> None:
    """Update the engine as verl's ServerAdapter does; `names` chooses and orders what is sent."""
    weights = sent_weights(model)
    server = replica.server_handle
    update = server.collective_rpc.remote("update_weights_from_ipc", kwargs={"use_shm": True})
    sender = BucketedWeightSender(
        channel_name(replica, 0),
        bucket_size_mb=1,
        use_shm=True,
    )
    await sender.async_send_weights((name, weights[name]) for name in names or spread_order(list(weights)))
    await update
    await server.clear_kv_cache.remote()
    await server.set_global_steps.remote(version)


def sent_weights(model: Qwen3ForCausalLM) -> dict[str, torch.Tensor]:
    """What a training worker sends: a tied head does not travel."""
    weights = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return weights


def channel_name(replica: PartialRolloutReplica, rank: int) -> str:
    """verl's name for the connection between a training rank and the engine worker of that rank."""
    job_id = ray.get_runtime_context().get_job_id()
    return f"ipc:///tmp/rl-colocate-zmq-{job_id}-replica-{replica.replica_rank}-rank-{rank}.sock"


class ChannelDriver:
    """Stands where verl's training workers would: sends to every worker of one replica by our channel."""

    def __init__(self, replica: PartialRolloutReplica) -> None:
        self.replica = replica
        self.buffer_bytes: int | None = BUFFER_BYTES
        self.update_number = 0
        self.address = ray.get(replica.server_handle.weight_channel.remote(), timeout=CALL_S)

    def update(self, weights: Callable[[], Iterable[tuple[str, torch.Tensor]]], version: int, **options: Any) -> None:
        """One update, the same weights from every rank; raises what the server raised."""
        update, sent = self.run([weights() for _ in range(self.replica.world_size)], version, **options)
        ray.get(update, timeout=CALL_S)
        for each in sent:
            each.result()

    def run(
        self,
        weights: list[Iterable[tuple[str, torch.Tensor]]],
        version: int = 0,
        *,
        of_workers: bool = False,
        peft_config: dict[str, Any] | None = None,
    ) -> tuple[ObjectRef, list[Future]]:
        """The server's call and what each rank sent; a thread for each, as training workers are own processes.

        With `of_workers` the engine's workers are called past the server, which then knows of no update.
        """
        self.update_number += 1
        server, options = self.replica.server_handle, {"update_number": self.update_number, "peft_config": peft_config}
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(weights)) as pool:
            senders = [stack.enter_context(self._sender(rank)) for rank in range(len(weights))]
            if of_workers:
                options |= {"timeout_s": CALL_S, "validate": True}
                update = server.collective_rpc.remote("receive_weights", kwargs=options)
            else:
                update = server.receive_weights.remote(version=version, **options)
            sent = [pool.submit(sender.send, each) for sender, each in zip(senders, weights, strict=True)]
        return update, sent

    def _sender(self, rank: int) -> WeightSender:
        name = channel_name(self.replica, rank)
        options = {
            "update_number": self.update_number,
            "buffer_bytes": self.buffer_bytes,
            "timeout_s": CALL_S,
            "check": lambda: None,
        }
        return WeightSender(self.address, name, **options)


class Rank:
    """Stands where a training rank would: the real adapter, on a thread of its own as ranks are processes."""

    def __init__(self, replica: PartialRolloutReplica, rank: int, *, first_update_number: int) -> None:
        adapter = self.adapter = object.__new__(ChannelAdapter)  # its parent's constructor looks for training workers
        adapter.zmq_handle, adapter.replica_rank = channel_name(replica, rank), replica.replica_rank
        adapter._has_server, adapter._server, adapter.node_rank = rank == 0, replica.server_handle, 0
        settings = PartialRolloutConfig.from_rollout(replica.config.custom)
        # No setting makes buffers so small that a stuck worker of this model stops its sender.
        weights = SimpleNamespace(buffer_bytes=BUFFER_BYTES)
        adapter._settings = SimpleNamespace(timeouts=settings.timeouts, weights=weights)
        adapter.failure, adapter._update_number = None, first_update_number - 1

    def update(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Update the weights as ChannelActorWorker does.

        Raises:
            WeightUpdateError: the rank's engine did not take the weights, which were gathered to the end.
        """
        self.adapter.failure = None
        asyncio.run(self.adapter.update_weights(weights, version))
        if self.adapter.failure is not None:
            raise WeightUpdateError(f"replica {self.adapter.replica_rank}: {self.adapter.failure}")


async def engine_processes(replica: PartialRolloutReplica) -> list[psutil.Process]:
    """All processes that the server has started."""
    pid = await replica.server_handle.__ray_call__.remote(lambda _: os.getpid())
    return psutil.Process(pid).children(recursive=True)


async def worker_process(replica: PartialRolloutReplica, rank: int) -> psutil.Process:
    """An engine worker of a replica with several."""
    children = await engine_processes(replica)
    return next(child for child in children if f"Worker_TP{rank}" in " ".join(child.cmdline()))


async def mapped_segments(replica: PartialRolloutReplica) -> list[str]:
    """The channel's segments that the engine has in memory, which it has for as long as a tensor lies there."""
    maps = [part.path for process in await engine_processes(replica) for part in process.memory_maps(grouped=False)]
    return [path for path in maps if path.startswith(f"{SHARED_MEMORY}/{owned_prefix()}")]


async def probe(client: ResumingLLMServerClient) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens and log-probs for PROBES."""
    sampling = {"temperature": 0.0, "logprobs": True, "ignore_eos": True, "max_tokens": NUM_PROBE_TOKENS}
    outputs = [await client.generate("probe", prompt_ids=ids, sampling_params=dict(sampling)) for ids in PROBES]
    return [(output.token_ids, output.log_probs) for output in outputs]


async def set_interrupt_mode(replica: PartialRolloutReplica, name: str) -> None:
    """Change the mode of a running server; one that was started with a mode of requests that stay can do all."""

    def change(server: Any) -> None:
        server._interruption.mode = server.engine._mode = MODES[name]

    await replica.server_handle.__ray_call__.remote(change)


async def in_time(attempt: Callable[[], Awaitable[T | None]]) -> T:
    """Repeat `attempt` until it returns a result; it returns None when its interruption came too late.

    An engine is another process: on a busy machine it may have ended its requests when the server hears of their first
    tokens, however long they are.
    """
    for _ in range(MOST_TRIES):
        if (result := await attempt()) is not None:
            return result
    raise AssertionError(f"none of {MOST_TRIES} interruptions came in time")


async def begin_interruptions(
    replica: PartialRolloutReplica, moments: list[int], *, opens: bool = False, stays_closed: bool = False
) -> None:
    """Let the server interrupt its requests by itself: each time when it has counted so many further tokens.

    An abort that is sent from the test arrives late on a busy machine: the engine may have ended the requests.
    `opens`: open the gate first. `stays_closed`: do not open it after the last interruption.
    """

    def begin(server: Any) -> None:
        async def interrupt() -> list[int]:
            aborted: list[int] = []
            if opens:
                await server.resume_generation()
            for moment in moments:
                least = server._gated.num_generated_tokens + moment
                while server._gated.num_generated_tokens < least:
                    if server.is_enough:
                        return aborted
                    await asyncio.sleep(0)
                aborted.append((await server.abort_all_requests())["aborted_count"])
                if not stays_closed or len(aborted) < len(moments):
                    await server.resume_generation()
            return aborted

        server.is_enough = False
        server.interruptions = asyncio.run_coroutine_threadsafe(interrupt(), server._engine_loop)

    await replica.server_handle.__ray_call__.remote(begin)


async def end_interruptions(
    replica: PartialRolloutReplica, *, is_enough: Callable[[], bool] = lambda: False
) -> list[int]:
    """How many requests each interruption met. `is_enough`: those to come are left out, as nothing generates."""

    def ask(server: Any, is_enough: bool) -> list[int] | None:
        server.is_enough = is_enough
        return server.interruptions.result() if server.interruptions.done() else None

    try:
        async with asyncio.timeout(UNTIL_S):
            while (aborted := await replica.server_handle.__ray_call__.remote(ask, is_enough())) is None:
                pass
    except TimeoutError:
        await replica.server_handle.__ray_call__.remote(ask, True)  # else it would interrupt later tests
        raise
    return aborted


def continued(
    first: Qwen3ForCausalLM, second: Qwen3ForCausalLM, ids: list[int], num_old: int, num_tokens: int
) -> tuple[list[int], list[float]]:
    """Greedy tokens of `second` after `ids`, whose first `num_old` tokens have KV of `first`; by transformers."""
    cache, tokens, log_probs = DynamicCache(), [], []
    with torch.no_grad():
        if num_old:
            first(torch.tensor([ids[:num_old]]), past_key_values=cache)
        rest = ids[num_old:]
        for _ in range(num_tokens):
            row = torch.log_softmax(second(torch.tensor([rest]), past_key_values=cache).logits[0, -1], dim=-1)
            rest = [int(row.argmax())]
            tokens += rest
            log_probs.append(float(row[rest[0]]))
    return tokens, log_probs


def spread_order(names: list[str]) -> list[str]:
    """Put tensors that form one engine layer far apart, so that a layer is complete only buckets later."""
    return sorted(names, key=lambda name: ("up_proj" in name, "v_proj" in name, "k_proj" in name, name))


def greedy_reference(model: Qwen3ForCausalLM, prompt_ids: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probs by transformers."""
    ids, log_probs = list(prompt_ids), []
    with torch.no_grad():
        for _ in range(num_tokens):
            row = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], dim=-1)
            token = int(row.argmax())
            ids.append(token)
            log_probs.append(float(row[token]))
    return ids[len(prompt_ids) :], log_probs
