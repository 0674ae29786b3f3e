"""One of two data-parallel ranks that compute a mini-batch in several ways; rank 0 writes gradients and log-probs.

Started by test_packed_engine: `python -m tests.ray.packed_ranks <folder>`, with the environment of a verl worker.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions
from verl.workers.utils.losses import ppo_loss

from partial_rollout.packing import GlobalPlanner
from partial_rollout.packing import attention as varlen_attention
from partial_rollout.packing.batch import MICRO_BATCH_FIELD, layout
from partial_rollout.packing.engine import ROWS_METRIC, PackedActorRolloutRefWorker
from partial_rollout.packing.planners import PaddedPlanner

if TYPE_CHECKING:
    from omegaconf import DictConfig

ROOT = Path(__file__).resolve().parents[2]
NUM_RANKS = 2
PROMPT = 4
RESPONSES = (50, 3, 40, 1, 6, 2, 9, 30, 5, 4, 12, 8)
LENGTHS = [PROMPT + length for length in RESPONSES]
MICRO_BATCH_SIZE = 3
BUDGET = 80
LOSS_MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
PLANNERS = {
    "global": GlobalPlanner(token_budget=BUDGET),
    "padded": PaddedPlanner(token_budget=2 * BUDGET),
}


def main(folder: Path) -> None:
    config = compose_config(folder)
    worker = PackedActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
    worker.init_model()
    samples = make_samples(vocabulary=worker.actor.model_config.hf_config.vocab_size)
    found = {mode: gradients_of(worker, samples, config, mode) for mode in LOSS_MODES}
    found["log_probs"] = {name: log_probs(worker, *part) for name, part in parts(samples, packed=False)}
    found["uneven"] = uneven_rows(worker, samples)
    engine = worker.actor.engine
    found["packed"] = {"sdpa": gradients_of(worker, samples, config, "token-mean", packed=True)}
    engine.module.set_attn_implementation(varlen_attention.NAME)
    found["packed"][varlen_attention.NAME] = gradients_of(worker, samples, config, "token-mean", packed=True)
    found["engine"] = type(engine).__name__
    if dist.get_rank() == 0:
        torch.save(found, folder / "found.pt")
    dist.barrier()


def compose_config(folder: Path) -> DictConfig:
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        return compose(
            "quickstart_cpu",
            overrides=[
                "data.train_files=none", "data.val_files=none", f"actor_rollout_ref.model.path={folder / 'model'}",
                "actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation=True",
                "trainer.n_gpus_per_node=2", f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={MICRO_BATCH_SIZE}",
            ],
        )  # fmt: skip


def dist_rank() -> int:
    return int(os.environ["RANK"])


def make_samples(vocabulary: int) -> TensorDict:
    """Samples in the order in which they were sampled, the same on both ranks."""
    generator = torch.Generator().manual_seed(1)

    def jagged(lengths: Any, make: Any) -> torch.Tensor:
        return torch.nested.as_nested_tensor([make(length) for length in lengths], layout=torch.jagged)

    def normal(length: int) -> torch.Tensor:
        return torch.randn(length, generator=generator)

    tokens = [torch.randint(vocabulary, (length,), generator=generator) for length in LENGTHS]
    fields = {
        "input_ids": torch.nested.as_nested_tensor(tokens, layout=torch.jagged),
        "prompts": torch.nested.as_nested_tensor([t[:PROMPT] for t in tokens], layout=torch.jagged),
        "responses": torch.nested.as_nested_tensor([t[PROMPT:] for t in tokens], layout=torch.jagged),
        "position_ids": jagged(LENGTHS, torch.arange),
        "response_mask": jagged(RESPONSES, lambda n: torch.ones(n, dtype=torch.int64)),
        "loss_mask": jagged(RESPONSES, lambda n: torch.ones(n, dtype=torch.int64)),
        "old_log_probs": jagged(RESPONSES, lambda n: -normal(n).abs() - 3),
        "advantages": jagged(RESPONSES, normal),
    }
    return TensorDict(fields, batch_size=len(LENGTHS))


def parts(samples: TensorDict, *, packed: bool) -> list[tuple[str, tuple[TensorDict, list[int]]]]:
    """What this rank gets of the samples, and which they are: from verl, and from each planner."""
    rank = dist_rank()
    verls = get_seqlen_balanced_partitions(LENGTHS, NUM_RANKS, equal_size=True)[rank]
    found = [("verl", (take(samples, verls, packed=packed), verls))]
    for name, planner in PLANNERS.items():
        order, numbers = layout(planner.plan(LENGTHS, NUM_RANKS))
        here = slice(rank * len(order) // NUM_RANKS, (rank + 1) * len(order) // NUM_RANKS)
        part = take(samples, order[here], packed=packed)
        part[MICRO_BATCH_FIELD] = as_stored(numbers[here])
        found.append((name, (part, order[here])))
    return found


def as_stored(numbers: list[int]) -> torch.Tensor:
    """The numbers as a rank gets them from TransferQueue."""
    return torch.nested.as_nested_tensor([torch.tensor([number]) for number in numbers], layout=torch.jagged)


def take(samples: TensorDict, indices: list[int], *, packed: bool) -> TensorDict:
    part = tu.index_select_tensor_dict(samples, indices)
    tu.assign_non_tensor(
        part, temperature=1.0, use_remove_padding=packed, use_dynamic_bsz=False, calculate_entropy=True,
        micro_batch_size_per_gpu=MICRO_BATCH_SIZE, global_batch_size=len(LENGTHS),
    )  # fmt: skip
    return part


def gradients_of(
    worker: PackedActorRolloutRefWorker, samples: TensorDict, config: DictConfig, mode: str, *, packed: bool = False
) -> dict[str, dict[str, Any]]:
    """Loss over both ranks and gradient of one mini-batch, for verl's micro-batches and for each planner's."""
    config.actor_rollout_ref.actor.loss_agg_mode = mode
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    found = {}
    for name, (part, _) in parts(samples, packed=packed):
        engine = worker.actor.engine
        with engine.train_mode():
            engine.optimizer_zero_grad()
            output = engine.forward_backward_batch(part, partial(ppo_loss, config=actor))
            gradient = [p.grad.full_tensor().flatten().clone() for p in engine.module.parameters()]
        loss = torch.tensor(sum(output["loss"]))
        dist.all_reduce(loss)
        found[name] = {
            "loss": loss.item(), "gradient": torch.cat(gradient), "rows": len(output["loss"]),
            "reported_rows": output["metrics"].pop(ROWS_METRIC, None),
            "metrics": {key: len(getattr(values, "values", values)) for key, values in output["metrics"].items()},
        }  # fmt: skip
    return found


def log_probs(worker: PackedActorRolloutRefWorker, part: TensorDict, indices: list[int]) -> dict[int, torch.Tensor]:
    """Log-probs of every sample of both ranks."""
    engine = worker.actor.engine
    with engine.eval_mode():
        values = engine.infer_batch(part)["model_output"]["log_probs"]
    mine = dict(zip(indices, (value.clone() for value in values.unbind()), strict=True))
    gathered: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(gathered, mine)
    return gathered[0] | gathered[1]


def uneven_rows(worker: PackedActorRolloutRefWorker, samples: TensorDict) -> str:
    """What a rank says whose neighbour has another number of rows."""
    part = take(samples, [0, 1], packed=False)
    part[MICRO_BATCH_FIELD] = as_stored([0, dist_rank()])
    with worker.actor.engine.eval_mode():
        try:
            worker.actor.engine.infer_batch(part)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return repr(error)
    return "nothing"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
