"""Screenshots of the trace viewer for README and docs/viewer.md, light and dark.

    python -m benchmarks.shots
    python -m benchmarks.shots run.jsonl --name viewer-1024

With a trace: all of it, and steps near its first preemption. The script prints the seconds until
the page can be used and the milliseconds per paint. Without a trace, SmolLM2-135M serves 15
requests on the CPU with so few blocks and so small a budget that all events occur: questions that
share a long instruction, a long prompt together with decodes, and stories that outgrow the pool and
preempt one another. Needs Chromium and playwright (``nox -s browser_tests`` installs it), and the
embedded model if no trace is given.
"""

from __future__ import annotations

import gzip
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagespec import LLM, SamplingParams, embedded_model_path
from pagespec.viewer.page import Verdict, make_page
from pagespec.viewer.timeline import read_timeline
from spec.replay import check
from tests.support.browser import open_page, started_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

IMAGES = Path(__file__).resolve().parents[1] / "docs/images"
_MAX_BYTES = 300 * 1024

INSTRUCTION = (
    "You are a careful assistant of the public library. Answer in the language of the question, in "
    "at most three sentences, and say when you do not know. The library opens at nine in the "
    "morning and closes at eight in the evening, on Sundays at six. Books are lent for four weeks, "
    "films for one. "
) * 2
QUESTIONS = (
    "When do you close on Sunday?",
    "How long may I keep a film?",
    "May I bring my dog?",
    "Did Melville write Moby Dick?",
    "Can I renew a book?",
    "What do you cost?",
    "Do you have maps?",
    "Where is the lift?",
    "Is there coffee?",
    "May I print here?",
)
STORY = "Once upon a time there was a lighthouse keeper with a list of the ships that passed. " * 28


def requests() -> list[tuple[str, int]]:
    """(prompt, tokens to generate)."""
    questions = [INSTRUCTION + question for question in QUESTIONS]
    tales = [f"Tale {i}: the ship that" for i in range(4)]
    return [
        *((question, 40) for question in questions[:4]),
        (STORY, 24),
        *((tale, 90) for tale in tales),
        *((question, 30) for question in questions[4:]),
    ]


def write_trace(path: Path) -> None:
    llm = LLM(
        str(embedded_model_path()),
        device="cpu",
        num_blocks=56,
        max_num_seqs=8,
        max_num_batched_tokens=96,
        max_inter_token_ms=0,  # the same schedule at any speed of the machine
        trace=path,
    )
    prompts, lengths = zip(*requests(), strict=True)
    params = [SamplingParams(max_tokens=n, ignore_eos=True, seed=i) for i, n in enumerate(lengths)]
    llm.generate(list(prompts), params, use_tqdm=False)


def write_page(trace: Path, page: Path) -> None:
    text = (
        gzip.decompress(trace.read_bytes()).decode() if trace.suffix == ".gz" else trace.read_text()
    )
    lines = text.splitlines()
    found = check(lines)
    said = f"accepted: {found.num_steps} steps" if not found.property_id else found.detail
    verdict = Verdict(found.line, found.property_id, said)
    page.write_text(make_page(read_timeline(lines), trace.name, verdict), encoding="utf-8")


def hover(page: Page, lane: int, step: int) -> None:
    x, y = page.evaluate(
        """([lane, step]) => {
          const { view, canvas } = window.viewer, box = canvas.getBoundingClientRect();
          const x = (view.x(view.stepBegin(step)) + view.x(view.stepEnd(step))) / 2;
          return [box.x + x, box.y + view.laneY(lane) + view.laneHeight / 2];
        }""",
        [lane, step],
    )
    page.mouse.move(x, y)


def show_steps(page: Page, first: int, last: int) -> None:
    page.evaluate(
        f"""() => {{
          const {{ view }} = window.viewer, begin = view.stepBegin({first});
          view.moveTo(begin, view.stepEnd({last}) - begin);
          window.viewer.paintNow();
        }}"""
    )


def arrange_all(_page: Page) -> None:
    pass


def arrange_long_prompt(page: Page) -> None:
    """The chunks of the long prompt, together with the decodes of four questions."""
    lane = page.evaluate(
        "viewer.trace.lanes.numPrompt.indexOf(Math.max(...viewer.trace.lanes.numPrompt))"
    )
    first = page.evaluate(f"viewer.trace.segments.step[viewer.trace.firstSegment[{lane}] + 1]")
    show_steps(page, max(first - 2, 0), first + 9)
    hover(page, lane, first + 2)


def arrange_preemption(page: Page) -> None:
    step = page.evaluate("viewer.trace.preemptions[0][0]")
    show_steps(page, step - 6, step + 16)
    page.evaluate("viewer.goToEvent(1)")


def arrange_shared_prefix(page: Page) -> None:
    """The first rows of questions that arrive when the instruction is in the cache."""
    lane = page.evaluate("Math.max(...viewer.trace.hits.map(([, lane]) => lane)) - 4")
    step = page.evaluate(f"viewer.trace.hits.find(([, lane]) => lane === {lane})[0]")
    show_steps(page, step - 5, step + 8)
    hover(page, lane, step)


SHOTS = {
    "viewer": arrange_all,
    "viewer-long-prompt": arrange_long_prompt,
    "viewer-preemption": arrange_preemption,
    "viewer-shared-prefix": arrange_shared_prefix,
}


def main(
    trace: Annotated[
        Path | None, typer.Argument(help="A step trace, or one that gzip packed.")
    ] = None,
    name: Annotated[str, typer.Option(help="What the pictures' names begin with.")] = "viewer-run",
) -> None:
    """Write the pictures to docs/images."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, started_browser() as browser:
        page_file = Path(folder) / "page.html"
        shots = SHOTS
        if trace is not None:
            shots = {name: arrange_all, f"{name}-step": arrange_preemption}
        else:
            trace = Path(folder) / "smollm2.jsonl"
            write_trace(trace)
        write_page(trace, page_file)
        print(f"{page_file.stat().st_size / 1e6:.1f} MB of HTML; {measured(browser, page_file)}")
        for shot, arrange in shots.items():
            for theme in ("light", "dark"):
                with open_page(browser, page_file, theme=theme) as page:
                    page.wait_for_function("window.viewer")
                    arrange(page)
                    page.wait_for_timeout(200)
                    path = IMAGES / f"{shot}-{theme}.png"
                    page.screenshot(path=path)
                size = path.stat().st_size
                print(f"{path.name} {size / 1024:.0f} KiB")
                assert size < _MAX_BYTES


def measured(browser: Browser, page_file: Path) -> str:
    """Seconds until the page can be used, and the time per paint while it is scrolled and moved."""
    begin = time.perf_counter()
    with open_page(browser, page_file) as page:
        page.wait_for_function("window.viewer")
        open_s = time.perf_counter() - begin
        paints = page.evaluate(
            """() => {
              const { view } = window.viewer, times = [];
              const num = window.viewer.trace.steps.number.length;
              for (let i = 0; i < 60; i++) {
                const first = Math.floor(i / 60 * num);
                const begin = view.stepBegin(first);
                view.moveTo(begin, view.stepEnd(Math.min(num - 1, first + num / 20 | 0)) - begin);
                const before = performance.now();
                window.viewer.paintNow();
                times.push(performance.now() - before);
              }
              return times.sort((a, b) => a - b);
            }"""
        )
    return f"opens in {open_s:.2f} s; a paint {paints[30]:.1f} ms, {paints[-1]:.1f} at most"


if __name__ == "__main__":
    typer.run(main)
