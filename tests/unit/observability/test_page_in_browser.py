"""The page in a real browser: live, with 5,000 prompts in flight, open for long, and number by number."""

from __future__ import annotations

import re
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
import pytest
from aiohttp.test_utils import TestServer

from partial_rollout import main_diffusion, view
from partial_rollout.observability.advice import would_help
from partial_rollout.observability.events import EventReader, GateMoved, StepEnded, WeightsUpdated
from partial_rollout.observability.gpu_seconds import gpu_seconds
from partial_rollout.observability.prompt_view import NO_TEXT, SO_FAR
from partial_rollout.observability.record import load
from partial_rollout.observability.summary import summary_lines
from partial_rollout.observability.waits import Waits, format_waits
from partial_rollout.view import RunState, make_app
from tests.unit.observability.browser import NEEDS_CHROMIUM, open_page
from tests.unit.observability.test_view import (
    EVIL,
    METRICS,
    TOKEN,
    a_run,
    an_image_run,
    dumped,
    phase,
    segment,
    step,
    taken,
    unfinished,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from partial_rollout.observability.events import AnyEvent

pytestmark = pytest.mark.slow
NUM_PROMPTS, NUM_LOOKS = 5_000, 15
CLICK = "new Event('click', {bubbles: true})"
CURVES = "[...document.querySelectorAll('#charts svg')].map(svg => [...svg.querySelectorAll('text')]\
.map(text => text.textContent).filter((text, number) => !number || text.startsWith('last step')))"
"""Title and last value of each."""
MAX_GROWTH_BYTES = 5_000_000
"""A look draws 0.7 million characters."""


@NEEDS_CHROMIUM
async def test_five_thousand_prompts_in_flight_are_drawn_and_a_page_that_is_left_open_does_not_grow(
    tmp_path: Path,
) -> None:
    def events() -> Iterable[AnyEvent]:
        yield from (step(number, 300) for number in range(1, 301))
        for number in range(NUM_PROMPTS):
            yield phase(f"p{number}", "engine", 1_000.0 + number / 100)
            yield segment(f"p{number}", 1_090.0 + number / 500, 0.5, f"s{number % 4}")

    now = iter(range(1_100, 100_000, 2))
    state = RunState(write(tmp_path, *events()), clock=lambda: float(next(now)))
    async with TestServer(make_app(state, TOKEN)) as server:  # noqa: SIM117 - the address is the server's
        async with open_page(str(server.make_url(f"/?token={TOKEN}")), tmp_path / "profile") as tab:
            await tab.until("document.body.dataset.step == '300'")
            said = await tab.value("document.getElementById('waiting').textContent")
            assert said.startswith("5000 prompts; the first 20 of 5000 rows. Prompts that are pending wait for a free")
            waits = await tab.cells("waits")
            assert [row[1] for row in waits[1:]] == [f"p{number}" for number in range(view.NUM_OLDEST)]
            assert await tab.value("document.querySelectorAll('#lanes [data-uid]').length") > 100
            before = await tab.memory()
            await tab.value(f"(async () => {{for (let i = 0; i < {NUM_LOOKS}; i++) await look()}})()")
            after = await tab.memory()
    # What was drawn last may not be collected yet; what was drawn before it is.
    assert after["Nodes"] < 3 * before["Nodes"]
    assert after["JSHeapUsedSize"] < before["JSHeapUsedSize"] + MAX_GROWTH_BYTES


@NEEDS_CHROMIUM
async def test_every_number_of_the_page_is_that_of_the_metrics_and_of_status(tmp_path: Path) -> None:
    """The seconds of a run's steps differ, so that a number of another step would be seen."""
    more = [
        StepEnded(t=100.0 + number, step=number, total=9, metrics={**METRICS, **numbers(number)})
        for number in range(3, 8)
    ]
    run = a_run(
        tmp_path,
        *more,
        phase("b", "engine", 104.0),
        WeightsUpdated(t=107.0, step=7, version=7, seconds=0.1),
        GateMoved(t=107.0, step=7, version=7, is_open=False, seconds=0.25, interrupted=3),
    )
    now = iter(range(110, 10_000, 2))
    state = RunState(run, clock=lambda: float(next(now)))
    async with TestServer(make_app(state, TOKEN)) as server:  # noqa: SIM117
        async with open_page(str(server.make_url(f"/?token={TOKEN}")), tmp_path / "profile") as tab:
            await tab.until("document.body.dataset.step == '7'")
            head, flow = await tab.parts("head"), await tab.parts("flow")
            steps, causes, waits = await tab.cells("steps"), await tab.cells("causes"), await tab.cells("waits")
            curves = await tab.value(CURVES)
            helps, summary = await tab.cells("helps"), await tab.cells("summary")
            why = await tab.value("document.getElementById('why').innerText")
            await tab.value("document.getElementById('which').value = 4; document.getElementById('which').onchange()")
            await tab.until("document.getElementById('why').innerText.startsWith('step 4 ')")
    metrics = {number: each.metrics for number, each in load(run).steps.items()}
    last = metrics[7]
    assert head[0] == "steps done 7/9"
    assert re.fullmatch(r"now step 8 for \d+ s, usually 13 s", head[1])
    assert head[2:5] == ["gate closed", "weights 7", "left about 26 s"]  # 2 steps of 13 s, mean of five
    assert flow == [f"{name} {last[f'partial_rollout/queue/{name}']:.0f}" for name in ("pending", "taken")]
    assert [(row[0], row[1]) for row in steps[1:]] == [
        (str(number), f"{metrics[number]['timing_s/step']:.1f}") for number in sorted(metrics, reverse=True)
    ]
    assert [row[7] for row in steps[1:]] == [
        f"{metrics[number]['partial_rollout/queue/pending']:.0f}" for number in sorted(metrics, reverse=True)
    ]
    assert steps[1][4:6] == ["3", "0.25 s"]
    seconds = gpu_seconds(load(run).series)
    assert {row[0]: row[1] for row in causes[1:-1]} == {cause: f"{each:,.1f}" for cause, each in seconds.items()}
    assert [row[6] for row in steps[1:]] == [*(f"{20 + number} of 64" for number in range(7, 2, -1)), "", ""]
    means = [each["critic/score/mean"] or 0.0 for each in metrics.values()]
    ends = {title.partition(",")[0]: end for title, end in curves}
    assert ends == {
        "reward": f"last step: {last['critic/score/mean']:g}, mean of the last {len(means)}: {fmean(means):.3g}",
        "seconds a step": f"last step: {last['timing_s/step']:g}",
        "seconds of generation a step": f"last step: {last['timing_s/gen']:g}",
        "slots in use while engines generate": f"last step: {last['partial_rollout/slot_utilisation']:.3g}",
        "prompts pending at the end of a step": f"last step: {last['partial_rollout/queue/pending']:g}",
    }
    assert helps == [[f"{what}?", said] for what, said in would_help(load(run))]
    assert summary == [line.split(maxsplit=1) for line in summary_lines(load(run))]
    assert re.match(r"step 8 goes on for \d+ s: the gate is closed for \d+ s", why)
    assert f"step 7 took {last['timing_s/step']:.1f} s" in why
    found = Waits()
    found.add(EventReader(run / "events").read())
    told = format_waits(found.now(), 0.0)  # status --why
    assert [row[1] for row in waits[1:]] == [wait.uid for wait in found.now()]
    for row in waits[1:]:
        assert f"row {row[0]}, prompt {row[1]}: {row[3]}" in told
        assert f"for {row[5]} since" in told
    assert waits[2][5] == "tokens of an engine (gate closed)"


def numbers(number: int) -> dict[str, float]:
    """Values of a step's metrics, different in every step."""
    return {
        "timing_s/step": 8.0 + number,
        "partial_rollout/queue/pending": 10.0 + number,
        "partial_rollout/mean_running": 20.0 + number,
        "partial_rollout/slot_utilisation": (20.0 + number) / 64,
    }


@NEEDS_CHROMIUM
async def test_an_image_job_has_its_pictures(tmp_path: Path) -> None:
    run = an_image_run(tmp_path)
    main_diffusion.save_grid([np.full((8, 8, 3), 200, dtype=np.uint8)] * 2, run / "before.png")
    (run / "notes.txt").write_text("not a picture")
    async with TestServer(make_app(RunState(run), TOKEN)) as server:  # noqa: SIM117
        async with open_page(str(server.make_url(f"/?token={TOKEN}")), tmp_path / "profile") as tab:
            await tab.until("document.querySelector('#pictures img')?.naturalWidth == 18")
            assert await tab.value("document.getElementById('pictures').textContent") == "before.png"
            shown = await tab.value("document.body.innerText")
            assert "row 1, trajectory 0: 6 denoise steps in" in await tab.value(
                "document.getElementById('lanes').textContent"
            )
            assert "no denoise step is computed again" in shown
            assert "async_training.partial_rollout" not in shown
            assert (await tab.cells("waits"))[1][-1] == ""
            assert await tab.cells("messages") == [["none"]]
            assert await tab.parts("flow") == ["ongoing 2", "done 0", "taken 4"]
            for name in ("notes.txt", "../before.png", "after.png"):
                answer = f"fetch('picture' + location.search + '&name={name}').then(answer => answer.status)"
                assert await tab.value(answer) == 404


@NEEDS_CHROMIUM
async def test_a_click_on_a_prompt_that_is_not_complete_shows_its_text_so_far(tmp_path: Path) -> None:
    state = RunState(unfinished(tmp_path))
    async with TestServer(make_app(state, TOKEN)) as server:  # noqa: SIM117
        async with open_page(str(server.make_url(f"/?token={TOKEN}")), tmp_path / "profile") as tab:
            await tab.until("document.querySelector('#waits [data-uid=u]') !== null")
            await tab.value("document.querySelector('#waits [data-uid=u]').click()")
            await tab.until("!document.getElementById('prompt').hidden")
            texts = await tab.value("[...document.querySelectorAll('#texts pre')].map(each => each.textContent)")
            assert texts == ["what is <b>2</b> + 2?", f"[... 298 tokens ...]of it four\n[response 2]\n{EVIL}"]
            said = await tab.value("[...document.querySelectorAll('#texts p')].map(each => each.textContent)")
            assert said == [SO_FAR, "trajectory 0; 304 tokens so far, of weights 2, 3, 5"]
            assert await tab.value("document.querySelectorAll('#texts b, img').length") == 0
            await tab.value("document.querySelector('#lanes [data-uid=silent]').dispatchEvent(" + CLICK + ")")
            await tab.until(f"document.getElementById('texts').textContent == {NO_TEXT!r}")


@NEEDS_CHROMIUM
async def test_a_browser_draws_the_page_and_shows_text_as_text(tmp_path: Path) -> None:
    """Live: a step that ends while the page is open comes, except while the page is paused."""
    now = iter(range(110, 10_000, 2))
    state = RunState(dumped(a_run(tmp_path, taken(200.0))), clock=lambda: float(next(now)))
    async with TestServer(make_app(state, TOKEN)) as server:  # noqa: SIM117 - the address is the server's
        address = str(server.make_url(f"/?token={TOKEN}"))
        async with open_page(address, tmp_path / "profile") as tab:
            await tab.until("document.body.dataset.step == '2'")
            shown = await tab.value("document.body.innerText")
            assert "step 2/9" in shown
            assert "pending 3" in shown
            assert EVIL in shown
            assert await tab.value("document.querySelectorAll('img').length") == 0
            bar = "row row-a, trajectory 0: 7 tokens in 1.0 s, weights 2, ended"
            assert bar in await tab.value("document.getElementById('lanes').textContent")

            await tab.value(
                "document.querySelector('#lanes [data-uid=a]').dispatchEvent(new Event('click', {bubbles: true}))"
            )
            await tab.until("!document.getElementById('prompt').hidden")
            text = await tab.value("document.getElementById('prompt').innerText")
            assert "score 1; 4 tokens of weights 2, 3 tokens of weights 3" in text or "score 1.0; 4 tokens" in text
            assert EVIL in text
            assert "taken for step 1" in text
            assert await tab.value("document.querySelectorAll('img').length") == 0

            await tab.value("document.getElementById('out').click()")
            await tab.until("document.getElementById('lanes').textContent.includes('engines, 240 s')")

            await tab.value("document.getElementById('pause').click()")
            write(tmp_path, step(3), role="driver")
            assert (
                await tab.value("fetch('state' + location.search).then(answer => answer.json()).then(now => now.step)")
                == 3
            )
            assert await tab.value("document.body.dataset.step") == "2"
            await tab.value("document.getElementById('pause').click()")
            await tab.until("document.body.dataset.step == '3'")
