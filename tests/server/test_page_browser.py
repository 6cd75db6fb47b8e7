"""The server's page in Chromium: typical use, over an engine with scripted answers."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pagespec import LLM, AsyncLLM
from tests.support.browser import OTHER_HOST, browser, open_page  # noqa: F401
from tests.support.content_llm import content_llm, slowed
from tests.support.scripted_llm import scripted_llm
from tests.support.server import serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = pytest.mark.browser

PARIS = "The capital of France is **Paris**. <img src=x onerror=alert(1)>"
CODE = "Here:\n\n```python\nprint(1)\n```\n\n1. one\n2. two"
THOUGHT = "<think>\nLet me see.\n</think>\n\nIt is 4."
LONG = "word " * 400
ANSWERS = (PARIS, CODE, THOUGHT, LONG)
STEP_S = 0.02


@contextmanager
def opened(
    browser: Browser,  # noqa: F811
    llm: LLM | None = None,
    *,
    config: dict[str, Any] | None = None,
    **view: Any,
) -> Iterator[tuple[Page, AsyncLLM, str]]:
    engine = AsyncLLM(slowed(llm or scripted_llm("qwen3", ANSWERS), STEP_S))
    with (
        serving(engine, model="scripted", **(config or {})) as url,
        open_page(browser, f"{url}/", **view) as page,
    ):
        page.set_default_timeout(20_000)
        yield page, engine, url


def ask(page: Page, answer: str, text: str = "Hello?") -> None:
    """Have the engine give one of ``ANSWERS``; its index is the seed."""
    if not page.locator("[name=seed]").is_visible():
        page.click("#settings summary")
    page.fill("[name=seed]", str(ANSWERS.index(answer)))
    page.click("#settings summary")
    page.fill("#input", text)
    page.press("#input", "Enter")


def wait_until(is_so: Callable[[], bool], seconds: float = 10.0) -> float:
    begin = time.monotonic()
    while not is_so():
        assert time.monotonic() - begin < seconds
        time.sleep(0.005)
    return time.monotonic() - begin


def test_a_message_is_answered_as_it_comes(browser: Browser) -> None:  # noqa: F811
    with opened(browser) as (page, _, _):
        page.wait_for_selector("#state[data-state=ready]")
        assert page.text_content("#model") == "scripted"
        ask(page, PARIS)
        lengths = set()
        while not page.locator(".message.assistant[data-ended]").count():
            lengths.add(len(page.text_content(".message.assistant .body") or ""))
        assert len(lengths) > 3, "not seen while it came"
        body = page.locator(".message.assistant .body")
        assert body.text_content() == "The capital of France is Paris. <img src=x onerror=alert(1)>"
        assert body.locator("strong").text_content() == "Paris"
        assert not body.locator("img").count()
        figures = page.text_content(".figures") or ""
        assert re.fullmatch(r"\d+ tokens · [\d.]+ tokens/s · first after [\d.]+ s", figures)
        assert page.text_content(".message.user .body") == "Hello?"

        page.click("text=Regenerate")
        page.wait_for_selector(".message.assistant:not([data-ended])")
        page.wait_for_selector(".message.assistant[data-ended]")
        assert page.locator(".message").count() == 2

        ask(page, CODE, "And in Python?")
        page.wait_for_selector(".message:last-child[data-ended]")
        assert page.text_content(".code pre") == "print(1)"
        assert page.locator(".message:last-child ol li").all_text_contents() == ["one", "two"]
        assert page.locator(".regenerate").count() == 1

        page.click("#new")
        assert not page.locator(".message").count()
        assert page.is_visible("#welcome")


def test_reasoning_is_folded(browser: Browser) -> None:  # noqa: F811
    with opened(browser) as (page, _, _):
        ask(page, THOUGHT)
        page.wait_for_selector("[data-ended]")
        assert page.text_content(".message.assistant .body > p") == "It is 4."
        assert not page.locator(".reasoning div").is_visible()
        page.click(".reasoning summary")
        assert (page.text_content(".reasoning div") or "").strip() == "Let me see."


@pytest.mark.parametrize("how", ["button", "escape", "leaving"])
def test_stopping_aborts_the_request(browser: Browser, how: str) -> None:  # noqa: F811
    with opened(browser) as (page, engine, url):
        ask(page, LONG)
        wait_until(lambda: len(page.text_content(".message.assistant .body") or "") > 20)
        assert engine.snapshot().num_running == 1
        if how == "button":
            page.click("#stop")
        elif how == "escape":
            page.keyboard.press("Escape")
        else:
            page.goto("about:blank")
        took = wait_until(lambda: engine.snapshot().num_running == 0)
        print(f"0 running after {1000 * took:.0f} ms")
        assert took < 1.0
        wait_until(lambda: httpx.get(f"{url}/live").json()["requests"]["ended"]["abort"] == 1)
        if how != "leaving":
            page.wait_for_selector("[data-ended=stopped]")
            assert (page.text_content(".message.assistant .body") or "").startswith("word word")
            assert page.is_visible("#send")
            ask(page, PARIS)  # and on it goes
            page.wait_for_selector(".message:last-child[data-ended=stop]")


def test_the_live_view_shows_the_numbers_of_live(browser: Browser) -> None:  # noqa: F811
    with opened(browser) as (page, _, url):
        ask(page, LONG)
        page.wait_for_selector('[data-live="requests.running"][data-value="1"]')
        assert int(page.get_attribute('[data-live="blocks.owned"]', "data-value") or 0) > 0
        page.click("#stop")
        # Rates are of the last five seconds: after those nothing changes.
        page.wait_for_selector('[data-live="steps.per_s"][data-value="0"]')
        frame = httpx.get(f"{url}/live").json()
        ended = frame["requests"]["ended"]
        frame["requests"]["finished"] = ended["stop"] + ended["length"]
        shown = page.evaluate(
            "[...document.querySelectorAll('[data-live]')]"
            ".map((one) => [one.dataset.live, one.dataset.value])"
        )
        assert len(shown) > 20
        for path, value in shown:
            true = frame
            for name in path.split("."):
                true = true[name]
            if path != "uptime_s":
                assert value == "null" if true is None else float(value) == true, path
        assert page.text_content('[data-live="requests.ended.abort"]') == "1"
        label = page.get_attribute("#map", "aria-label") or ""
        assert f"{frame['blocks']['cached']} cached" in label


@pytest.mark.parametrize("width", [320, 390, 860, 1280])
def test_nothing_is_wider_than_the_screen(browser: Browser, width: int) -> None:  # noqa: F811
    with opened(browser, width=width, height=800) as (page, _, _):
        ask(page, CODE, "a" * 300)
        page.wait_for_selector("[data-ended]")
        page.click("#settings summary")
        for view in ("chat", "engine"):
            if width <= 860:
                page.click(f".views [data-view={view}]")
                hidden = {"chat": "engine", "engine": "chat"}[view]
                assert not page.locator(f"#{hidden}").is_visible()
            assert page.locator(f"#{view}").is_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            for one in page.locator("button:visible, input:visible, textarea:visible").all():
                box = one.bounding_box()
                assert box is not None
                assert box["x"] >= 0
                assert box["x"] + box["width"] <= width


def test_a_model_without_a_template_continues_text(browser: Browser) -> None:  # noqa: F811
    with opened(browser, content_llm()) as (page, _, _):
        page.wait_for_selector("#input[placeholder='Text to continue']")
        page.click("#settings summary")
        page.fill("[name=max_tokens]", "7")
        page.fill("#input", "abcab")
        page.click("#send")
        page.wait_for_selector("[data-ended]")
        assert re.fullmatch("[abc]{0,7}", page.text_content(".message.assistant .body") or "")
        assert not page.locator(".error").count()


def test_a_key_is_requested_and_kept_for_the_tab(browser: Browser) -> None:  # noqa: F811
    config = {"api_keys": ["correct horse"]}
    with opened(browser, config=config) as (page, _, _):
        page.wait_for_selector("dialog[open]")
        page.fill("#key-input", "wrong")
        page.keyboard.press("Enter")
        wait_until(lambda: page.input_value("#key-input") == "")
        page.wait_for_selector("dialog[open]")
        page.fill("#key-input", "correct horse")
        page.click("#key-ok")
        page.wait_for_selector("#state[data-state=ready]")
        ask(page, PARIS)
        page.wait_for_selector("[data-ended=stop]")
        assert "correct horse" not in page.evaluate("JSON.stringify(localStorage)")
        page.reload()
        page.wait_for_selector("#state[data-state=ready]")
        assert not page.locator("dialog[open]").count()


def test_a_rejected_key_is_reported(browser: Browser) -> None:  # noqa: F811
    with opened(browser, config={"api_keys": ["right"]}) as (page, _, _):
        page.wait_for_selector("dialog[open]")
        assert not page.is_visible("#key-refused")
        for _ in range(2):
            page.fill("#key-input", "wrong")
            page.keyboard.press("Enter")
            page.wait_for_selector("dialog[open] #key-refused:visible")
            assert page.text_content("#key-refused") == "The server refuses this key."
            assert page.input_value("#key-input") == ""
            page.keyboard.press("Escape")
            page.wait_for_selector("#state[data-state=locked]")
            page.click("#key")
            assert not page.is_visible("#key-refused")
        page.fill("#key-input", "right")
        page.keyboard.press("Enter")
        page.wait_for_selector("#state[data-state=ready]")
        assert not page.locator("dialog[open]").count()


@pytest.mark.parametrize("host", ["127.0.0.1", OTHER_HOST])
def test_copying_works_from_any_host(browser: Browser, host: str) -> None:  # noqa: F811
    engine = AsyncLLM(slowed(scripted_llm("qwen3", ANSWERS), STEP_S))
    with serving(engine, model="scripted") as url:
        address = url.replace("127.0.0.1", host) + "/"
        with open_page(browser, address) as page:
            page.set_default_timeout(20_000)
            assert page.evaluate("isSecureContext") == (host != OTHER_HOST)
            for answer, button, copied in (
                (PARIS, "footer button:not(.regenerate)", PARIS),
                (CODE, ".code button", "print(1)"),
            ):
                ask(page, answer)
                page.wait_for_selector(".message:last-child[data-ended=stop]")
                page.click(f".message:last-child {button}")
                page.wait_for_selector(f".message:last-child {button}:has-text('Copied')")
                page.fill("#input", "")
                page.press("#input", "Control+V")
                assert page.input_value("#input") == copied
                page.fill("#input", "")
            assert not page.locator("textarea.copied").count()


def test_values_that_cannot_be_copied_are_reported(browser: Browser) -> None:  # noqa: F811
    with opened(browser) as (page, _, _):
        refuse = "Object.defineProperty(navigator, 'clipboard', {value: undefined});"
        page.evaluate(refuse + "document.execCommand = () => false")
        ask(page, PARIS)
        page.wait_for_selector("[data-ended=stop]")
        page.click("footer button:not(.regenerate)")
        page.wait_for_selector("footer button:has-text('Not copied')")


PIECE = '{"choices": [{"index": 0, "delta": {"content": "So"}, "finish_reason": null}]}'
ERROR = '{"error": {"message": "the engine failed"}}'


@pytest.mark.parametrize(
    ("status", "body", "kept"),
    [
        (500, ERROR, None),
        (200, f"data: {ERROR}\n\ndata: [DONE]\n\n", None),
        (200, f"data: {PIECE}\n\ndata: {ERROR}\n\ndata: [DONE]\n\n", "So"),
    ],
)
def test_a_failed_answer_is_not_sent_on(
    browser: Browser,  # noqa: F811
    status: int,
    body: str,
    kept: str | None,
) -> None:
    with opened(browser) as (page, _, _):
        sent: list[list[dict[str, str]]] = []
        is_failing = True

        def answer(route: Route) -> None:
            sent.append(route.request.post_data_json["messages"])
            if is_failing:
                route.fulfill(status=status, body=body, content_type="text/event-stream")
            else:
                route.continue_()

        page.route("**/v1/chat/completions", answer)
        ask(page, PARIS, "First?")
        page.wait_for_selector(".message:last-child[data-ended=failed]")
        page.click("text=Regenerate")
        wait_until(lambda: page.wait_for_timeout(20) or len(sent) == 2)  # lets `answer` run
        page.wait_for_selector(".message:last-child[data-ended=failed]")
        is_failing = False
        ask(page, PARIS, "Second?")
        page.wait_for_selector(".message:last-child[data-ended=stop]")
        ask(page, PARIS, "Third?")
        page.wait_for_selector(".message:last-child[data-ended=stop]")
        first, second = (
            {"role": "user", "content": "First?"},
            {"role": "user", "content": "Second?"},
        )
        before = [first, {"role": "assistant", "content": kept}] if kept else []
        assert sent[:3] == [[first], [first], [*before, second]]
        assert [m["role"] for m in sent[3]] == ["user", "assistant"] * (len(sent[3]) // 2) + [
            "user"
        ]
        assert all(message["content"] for messages in sent for message in messages)


def test_a_missing_key_is_requested_once(browser: Browser) -> None:  # noqa: F811
    with opened(browser, config={"api_keys": ["k"]}) as (page, _, _):
        page.wait_for_selector("dialog[open]")
        page.keyboard.press("Escape")
        page.wait_for_selector("#state[data-state=locked]")
        page.wait_for_timeout(2500)
        assert not page.locator("dialog[open]").count()
        page.click("#key")
        page.fill("#key-input", "k")
        page.keyboard.press("Enter")
        page.wait_for_selector("#state[data-state=ready]")


def test_a_refusal_is_shown(browser: Browser) -> None:  # noqa: F811
    with opened(browser) as (page, _, _):
        page.wait_for_selector("#state[data-state=ready]")
        page.click("#settings summary")
        page.fill("[name=stop]", "\n".join("abcde" * 30))
        page.fill("#input", "Hello?" * 3000)
        page.click("#send")
        page.wait_for_selector(".error[role=alert]")
        assert page.is_visible("#send")


def test_dark_and_light_are_the_systems_or_chosen(browser: Browser) -> None:  # noqa: F811
    def background(page: Page) -> Any:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    with opened(browser, theme="dark") as (page, _, _):
        assert background(page) == "rgb(20, 23, 27)"
        page.click("#theme")
        assert background(page) == "rgb(255, 255, 255)"
        page.reload()
        assert background(page) == "rgb(255, 255, 255)"


def test_all_can_be_done_by_keyboard(browser: Browser) -> None:  # noqa: F811
    with opened(browser) as (page, _, _):
        page.wait_for_selector("#state[data-state=ready]")
        names = []
        for _ in range(14):
            page.keyboard.press("Tab")
            names.append(
                page.evaluate(
                    "document.activeElement.id || document.activeElement.getAttribute('class')"
                    " || document.activeElement.textContent.trim()"
                )
            )
        assert names[0] == "skip"
        assert [n for n in names if n in ("new", "key", "theme", "log", "Parameters", "input")] == [
            *("new", "key", "theme", "log", "Parameters", "input")
        ]
        page.focus("#input")
        page.keyboard.type("one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        page.keyboard.press("Enter")
        page.wait_for_selector("[data-ended]")
        assert page.text_content(".message.user .body") == "one\ntwo"
        unnamed = page.evaluate(
            "[...document.querySelectorAll('button, input, textarea, canvas')].filter((one) =>"
            " !one.ariaLabel && !one.textContent.trim() && !one.closest('label')).length"
        )
        assert unnamed == 0
