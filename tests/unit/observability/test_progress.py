"""A run's log becomes a bar and one line per step."""

import io

from partial_rollout.observability.progress import ProgressView, parse_metrics
from partial_rollout.observability.step_line import step_line

CONSOLE = (
    "(TaskRunner pid=7) step:3 - critic/score/mean:0.25 - timing_s/gen:1.5 - timing_s/step:2.0 - "
    "perf/total_num_tokens:400 - training/global_step:3 - partial_rollout/interrupted:5 - "
    "partial_rollout/resumed_trajectories:2 - partial_rollout/queue/pending:1 - "
    "partial_rollout/queue/ongoing:16 - partial_rollout/queue/done:0"
)


def test_numbers_are_read_in_every_spelling() -> None:
    assert parse_metrics("a/b:1.5 - c:np.float64(-2e-05) - d:text") == {"a/b": 1.5, "c": -2e-05}


def test_a_step_becomes_one_line() -> None:
    out = io.StringIO()
    view = ProgressView(out)
    view.feed("(TaskRunner pid=7) Training Progress:   3%|3   | 2/60 [00:01<00:30,  2.00it/s]")
    view.feed(CONSOLE)
    view.close()
    assert (
        "step 3/60 | reward 0.250 | gen 1.5 s | step 2.0 s | 200 tokens/s | interrupted 5 | resumed 2 | "
        "queue pending 1 ongoing 16 done 0"
    ) in out.getvalue()


def test_errors_and_milestones_pass_and_noise_does_not() -> None:
    out = io.StringIO()
    view = ProgressView(out)
    for line in ("WARNING noise", "(TaskRunner pid=7) partial_rollout: engines are up", "error: data.x is missing"):
        view.feed(line)
    assert out.getvalue().split("\n") == ["partial_rollout: engines are up", "error: data.x is missing", ""]


def test_verls_own_modes_have_no_queue_part() -> None:
    assert step_line(1, None, {"critic/score/mean": 0.5}) == "step 1 | reward 0.500"
