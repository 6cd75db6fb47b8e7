"""The viewer's page in Chromium: the drawing matches the trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pagespec.viewer.page import Verdict, make_page
from pagespec.viewer.timeline import read_timeline
from spec.replay import check
from tests.support.browser import browser, open_page
from tests.support.traces import in_full, write_trace

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["browser"]
pytestmark = pytest.mark.browser

# The middle of a row's slice in the window; the lane is scrolled to.
PLACE_OF_ROW = """([lane, step]) => {
  const { view, canvas } = window.viewer, box = canvas.getBoundingClientRect();
  const x = (view.x(view.stepBegin(step)) + view.x(view.stepEnd(step))) / 2;
  return [box.x + x, box.y + view.laneY(lane) + view.laneHeight / 2];
}"""
# The colour that is drawn low in a row's slice, beside its text.
COLOUR_OF_ROW = """([lane, step]) => {
  const { view, painter } = window.viewer, ratio = window.devicePixelRatio;
  const x = view.x(view.stepBegin(step)) * 0.3 + view.x(view.stepEnd(step)) * 0.7;
  const y = view.laneY(lane) + view.laneHeight - 3;
  const [r, g, b] = painter.context.getImageData(x * ratio, y * ratio, 1, 1).data;
  return "#" + [r, g, b].map((part) => part.toString(16).padStart(2, "0")).join("");
}"""


def write_page(folder: Path, lines: list[str]) -> Path:
    found = check(lines)
    said = f"REFUSED: {found.property_id}: {found.detail}" if found.property_id else "accepted"
    page = folder / "t.html"
    verdict = Verdict(found.line, found.property_id, said)
    page.write_text(make_page(read_timeline(lines), "t.jsonl", verdict), encoding="utf-8")
    return page


def plans_of(lines: list[str]) -> list[dict[str, Any]]:
    return [event for event in map(json.loads, in_full(lines)) if event["event"] == "plan"]


@pytest.fixture(params=[0, 1], ids=["depth-0", "depth-1"])
def lines(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    return write_trace(tmp_path / "t.jsonl", pipeline_depth=request.param)


@pytest.fixture(params=["light", "dark"])
def page(
    request: pytest.FixtureRequest, browser: Browser, tmp_path: Path, lines: list[str]
) -> Iterator[Page]:
    with open_page(browser, write_page(tmp_path, lines), theme=request.param) as found:
        found.wait_for_function("window.viewer")
        yield found


def test_every_slice_is_a_row_and_every_row_a_slice(page: Page, lines: list[str]) -> None:
    plans = plans_of(lines)
    assert page.evaluate("viewer.trace.numRows()") == sum(len(plan["rows"]) for plan in plans)
    names = page.evaluate("viewer.trace.lanes.name")
    for place, plan in enumerate(plans):
        drawn = page.evaluate(f"viewer.trace.rowsOf({place})")
        rows = {(names[r["lane"]], r["start"], r["numTokens"], r["numSamples"]) for r in drawn}
        assert rows == {tuple(row) for row in plan["rows"]}


def test_every_slice_is_drawn_in_its_colour(page: Page, lines: list[str]) -> None:
    """Steps without a row of the request have no row's colour."""
    page.keyboard.press("t")  # every step equally wide
    page.evaluate("viewer.paintNow()")
    colours = page.evaluate("viewer.painter.colours")
    names = page.evaluate("viewer.trace.lanes.name")
    num_drawn = 0
    for step, plan in enumerate(plans_of(lines)):
        rows = {name: (start, n, sampled) for name, start, n, sampled in plan["rows"]}
        for lane, name in enumerate(names):
            seen = page.evaluate(COLOUR_OF_ROW, [lane, step])
            if name in rows:
                kind = page.evaluate(f"viewer.trace.row({lane}, {step}).kind")
                assert seen == colours["decode" if kind == 5 else "prefill"], (name, step)
                num_drawn += 1
            else:
                assert seen not in (colours["decode"], colours["prefill"]), (name, step)
    assert num_drawn == sum(len(plan["rows"]) for plan in plans_of(lines))


def test_hovering_a_slice_shows_the_values_of_its_row(page: Page, lines: list[str]) -> None:
    page.keyboard.press("t")
    page.evaluate("viewer.paintNow()")
    names = page.evaluate("viewer.trace.lanes.name")
    for step, plan in enumerate(plans_of(lines)[:12]):
        for name, start, num_tokens, sampled in plan["rows"]:
            x, y = page.evaluate(PLACE_OF_ROW, [names.index(name), step])
            page.mouse.move(x, y)
            said = page.locator("#tip").inner_text()
            assert said.startswith(f"{name}: "), said
            assert f"{start} to {start + num_tokens - 1}" in said
            assert f"samples\n{int(sampled)}" in said
            assert f"step\n{plan['step']}" in said


def test_hovering_a_row_shows_its_content(browser: Browser, tmp_path: Path) -> None:
    """As does the panel of its step: which positions of which content it computes, or found."""
    lines = write_trace(tmp_path / "t.jsonl", has_contents=True)
    contents = {
        event["id"]: event["segments"][1][1]
        for event in map(json.loads, lines)
        if event["event"] == "add"
    }
    num_told = num_found = 0
    with open_page(browser, write_page(tmp_path, lines), theme="light") as page:
        page.wait_for_function("window.viewer")
        page.keyboard.press("t")
        page.evaluate("viewer.paintNow()")
        names = page.evaluate("viewer.trace.lanes.name")
        for step, plan in enumerate(plans_of(lines)[:12]):
            hits = dict(map(tuple, plan["hits"]))
            for name, start, num_tokens, _ in plan["rows"]:
                first, last = max(start, 2), min(start + num_tokens, 10) - 1
                x, y = page.evaluate(PLACE_OF_ROW, [names.index(name), step])
                page.mouse.move(x, y)
                said = page.locator("#tip").inner_text()
                part = f"positions {first - 2} to {last - 2} of {contents[name][:12]}"
                if first < last:
                    assert f"\ncontent\n{part}" in said
                    num_told += 1
                elif first > last:
                    assert "\ncontent\n" not in said
                if hits.get(name, 0) > 3:
                    end = min(hits[name], 10) - 3
                    found = f"positions 0 to {end} of {contents[name][:12]}"
                    assert f"\ncached content\n{found}" in said
                    num_found += 1
        page.mouse.click(*page.evaluate(PLACE_OF_ROW, [0, 0]))
        assert "positions 0 to 7 of" in page.locator("#panel").inner_text()
    assert num_told > 3
    assert num_found > 0


def test_a_waiting_request_shows_the_reason(page: Page, lines: list[str]) -> None:
    page.keyboard.press("t")
    page.evaluate("viewer.paintNow()")
    names = page.evaluate("viewer.trace.lanes.name")
    refused = [(i, r) for i, plan in enumerate(plans_of(lines)) for r in plan["refused"]]
    assert refused
    for step, (name, reason) in refused:
        assert page.evaluate(f"viewer.trace.reason({names.index(name)}, {step})")
        if reason not in ("full", "budget", "preempting"):
            continue
        x, y = page.evaluate(PLACE_OF_ROW, [names.index(name), step])
        page.mouse.move(x, y)
        assert reason in page.locator("#tip").inner_text()
    last = len(names) - 1
    assert page.evaluate(f"viewer.trace.reason({last}, 0)").startswith("behind request-")


def test_a_click_shows_the_plan_of_a_step(page: Page, lines: list[str]) -> None:
    plan = next(plan for plan in plans_of(lines) if plan["preempted"])
    x, y = page.evaluate(PLACE_OF_ROW, [0, plans_of(lines).index(plan)])
    page.mouse.click(x, y)
    said = page.locator("#panel").inner_text()
    assert f"Step {plan['step']}" in said
    assert f"ROWS: {len(plan['rows'])}" in said.upper()
    assert plan["preempted"][0] in said
    assert f"for {plan['askers'][0]}" in said
    for name, *_ in plan["rows"]:
        assert name in said
    page.keyboard.press("Escape")
    assert page.locator("#panel").is_hidden()


def test_wheel_and_keys_zoom_pan_and_fit(page: Page) -> None:
    span = "viewer.view.end - viewer.view.begin"
    whole = page.evaluate(span)
    x, y = page.evaluate(PLACE_OF_ROW, [0, 3])
    page.mouse.move(x, y)
    page.mouse.wheel(0, -300)
    page.wait_for_function(f"{span} < {whole} * 0.8")
    page.locator("canvas").focus()
    page.keyboard.press("w")
    zoomed = page.evaluate(span)
    begin = page.evaluate("viewer.view.begin")
    page.keyboard.press("d")
    assert page.evaluate("viewer.view.begin") > begin
    assert page.evaluate(span) == pytest.approx(zoomed)
    page.keyboard.press("0")
    assert page.evaluate(span) == pytest.approx(whole)


def test_a_request_is_found(page: Page) -> None:
    page.keyboard.press("/")
    page.keyboard.type("request-7")
    assert page.locator("#found").inner_text() == "1"
    assert page.evaluate("[...viewer.painter.found]") == [7]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_violated_property_is_marked(
    browser: Browser, tmp_path: Path, lines: list[str], theme: str
) -> None:
    plans = plans_of(lines)
    line = next(i for i, text in enumerate(lines) if json.loads(text).get("step") == 6)
    event = json.loads(lines[line])
    event["pool"] = [event["pool"][0] + 1, *event["pool"][1:]]
    altered = [*lines[:line], json.dumps(event), *lines[line + 1 :]]
    with open_page(browser, write_page(tmp_path, altered), theme=theme) as page:
        page.wait_for_function("window.viewer")
        assert page.locator("#verdict").inner_text() == "S2 violated"
        assert page.evaluate("viewer.trace.violation.step") == 6 < len(plans)
        place = page.evaluate(
            """() => {
              const { view, painter } = window.viewer, x = view.x(view.stepBegin(6));
              const data = painter.context.getImageData(
                x * devicePixelRatio, (LANES_TOP - 14) * devicePixelRatio, 1, 1).data;
              return [...data].slice(0, 3).map((part) => part.toString(16).padStart(2, "0"));
            }"""
        )
        assert "#" + "".join(place) == page.evaluate("viewer.painter.colours.violation")
        x, y = page.evaluate(PLACE_OF_ROW, [0, 6])
        page.mouse.click(x, y)
        assert "S2" in page.locator("#panel").inner_text()
