from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from verl.trainer.ppo.reward import get_custom_reward_fn

from partial_rollout.run.quickstart.reward import DATA_SOURCE, compute_score, is_right


@pytest.mark.parametrize(
    ("solution", "right"),
    [
        ("y02z01a00#a", True),
        ("#a", True),
        ("#b#a ", True),
        ("#a#b", False),
        ("a", False),
        ("", False),
        ("#", False),
        ("#aa", False),
        ("#A", False),
    ],
)
def test_only_the_last_marked_letter_counts(solution: str, right: bool):
    assert compute_score(DATA_SOURCE, solution, "a") == float(right)


@given(solution=st.one_of(st.text(), st.none(), st.binary(), st.integers()), truth=st.one_of(st.text(), st.none()))
def test_garbage_scores_zero_and_never_raises(solution: Any, truth: Any):
    marked = isinstance(solution, str) and "#" in solution
    assert compute_score(DATA_SOURCE, solution, truth) in ({0.0, 1.0} if marked else {0.0})


def test_an_empty_truth_is_no_free_reward():
    assert not is_right("no answer at all", "")


def test_gsm8k_rows_are_scored_by_verl():
    assert compute_score("openai/gsm8k", "so #### 1,234", "1234") == 1.0
    assert compute_score("openai/gsm8k", "so 1234", "1234") == 0.0


def test_an_unknown_source_is_named():
    with pytest.raises(NotImplementedError, match="no/such"):
        compute_score("no/such", "#a", "a")


def test_verl_finds_it_under_the_configured_name():
    where = {"path": "pkg://partial_rollout.run.quickstart.reward", "name": "compute_score"}
    function = get_custom_reward_fn(OmegaConf.create({"reward": {"custom_reward_function": where}}))
    assert function is not None
    # verl's naive reward manager calls the function with these arguments.
    assert function(data_source=DATA_SOURCE, solution_str="#c", ground_truth="c", extra_info={"num_turns": 2}) == 1.0
