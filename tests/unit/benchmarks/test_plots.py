"""Pictures are drawn from whatever a run has stored, whole or cut off."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.plots import draw_slots, draw_steps, main
from partial_rollout.advise.result import store


def jobs() -> dict:
    """The first job was cut off before its first step ended, the last one before a measured step did."""
    steps = [{"timing_s/gen": wall_s} for wall_s in (4.0, 5.0)]
    samples = [[float(second), 8 - second % 3] for second in range(40)]
    whole = {
        "ends_s": [10.0, 16.0, 22.0, 28.0],
        "first_steps": [{"timing_s/gen": 1.0}, {"timing_s/gen": 9.0}],
        "steps": steps,
        "samples": samples,
    }
    nowhere = {"mode": "sync", "ends_s": [], "first_steps": [], "steps": [], "samples": []}
    cut = {**nowhere, "mode": "partial_rollout", "ends_s": [10.0]}
    load = {"batch": 2, "group": 4}
    both = [{**whole, "mode": mode} for mode in ("sync", "unheard_of")]
    return {"engine": {"shape": "tiny"}, "devices": ["H200, 1"], "workload": load, "jobs": [nowhere, *both, cut]}


def axes_of(drawn, found: dict):
    axes = Figure().add_subplot()
    drawn(axes, found)
    return axes


def test_requests_are_a_share_of_a_batch_from_the_first_step_on():
    axes = axes_of(draw_slots, jobs())
    assert axes.get_legend_handles_labels()[1] == ["verl sync", "unheard_of"]
    seconds, shares = axes.lines[0].get_data()
    assert (list(seconds[:3]), list(shares[:3])) == ([0.0, 1.0, 2.0], [7 / 8, 6 / 8, 8 / 8])
    assert list(axes.lines[1].get_xdata()) == [6.0, 12.0, 18.0]


def test_steps_are_drawn_by_their_numbers_without_the_first():
    seconds = axes_of(draw_steps, jobs()).lines[0]
    assert (list(seconds.get_xdata()), list(seconds.get_ydata())) == ([2, 3, 4], [9.0, 4.0, 5.0])


def test_a_picture_for_everything_that_was_measured(tmp_path, capsys):
    curve = {"curve": {"cell": [{"concurrency": 8, "context": 96, "decode_ms": 2.0}]}}
    unseen = {**jobs(), "jobs": [{**job, "samples": []} for job in jobs()["jobs"]]}
    found = {"whole": jobs(), "unseen": unseen, "curve": {"engine": {"shape": "tiny"}, "devices": [], **curve}}
    paths = [tmp_path / f"{name}.json" for name in found]
    for path, result in zip(paths, found.values(), strict=True):
        store(result, path, raw=["jobs"])
    main([*map(str, paths), "--out", str(tmp_path / "out")])
    drawn = sorted(path.stem for path in (tmp_path / "out").iterdir())
    assert drawn == ["curve_curve", "slots_whole", "steps_unseen", "steps_whole"]
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "out").iterdir())
