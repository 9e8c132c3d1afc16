"""The page in a real browser: sorting, filters, records, keyboard, and nothing on the console."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from forge.harness import leaderboard, page, publish, records

playwright = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright: pip install playwright"
)
BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
RESULTS = Path(__file__).resolve().parents[1] / "results"
HOSTILE = "</script><script>hacked=1</script><img src=x onerror=hacked=1>"


@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"needs a browser on PATH: {', '.join(BROWSERS)}")
    with playwright.sync_playwright() as driver:
        # As root there is no sandbox; the page is ours.
        with driver.chromium.launch(executable_path=found, args=["--no-sandbox"]) as opened:
            yield opened


@pytest.fixture(scope="module")
def board():
    """The recorded runs, and a second run whose texts are hostile."""
    real = leaderboard.read(RESULTS / "runs", RESULTS / "published.csv")
    evil = [
        replace(row, run_id="2000-01-01_evil", date="2000-01-01T00:00:00Z", notes=HOSTILE,
                method=f"{HOSTILE}{i}", environment={"command": HOSTILE})
        for i, row in enumerate(real.rows[:3])
    ]  # fmt: skip
    return replace(real, rows=[*real.rows, *evil], passes=[*real.passes, *evil])


@pytest.fixture(scope="module")
def address(board, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "index.html"
    file.write_text(page.render(board, publish.draw(board)), encoding="utf-8")
    return file.as_uri()


@pytest.fixture
def tab(browser, address):
    """The page, freshly opened; at the end nothing was complained about and nothing was loaded."""
    context = browser.new_context()
    tab = context.new_page()
    said, asked = [], []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(address)
    yield tab
    assert said == [] and asked == [address]
    assert tab.evaluate("typeof hacked") == "undefined"
    context.close()


def column(tab, title: str, kind: str = "measured") -> list[str]:
    """Texts of a column in the first group of ``kind``."""
    titles = tab.locator("thead th").all_inner_texts()
    place = [text.strip() for text in titles].index(title)
    return tab.locator(f"tbody[data-kind={kind}]").first.evaluate(
        "(body, place) => [...body.querySelectorAll('.row')].map((r) => r.cells[place].innerText)",
        place,
    )


def numbers(texts: list[str]) -> list[float]:
    return [float(text.replace(",", "")) for text in texts if text[:1].isdigit()]


def test_sorting_stays_within_a_run(tab):
    groups = tab.locator("tbody").evaluate_all("all => all.map((b) => b.rows.length)")
    header = tab.locator("thead th", has_text="peak GiB")
    assert header.get_attribute("aria-sort") == "none"
    for direction, reverse in (("ascending", False), ("descending", True)):
        header.locator("button").click()
        assert header.get_attribute("aria-sort") == direction
        texts = column(tab, "peak GiB")
        found = numbers(texts)
        assert found == sorted(found, reverse=reverse) and len(found) > 10
        assert texts[: len(found)] == [text for text in texts if text], "empty cells are not last"
        assert tab.locator("tbody").evaluate_all("all => all.map((b) => b.rows.length)") == groups
        assert tab.locator("tbody tr:first-child.group").count() == len(groups)
    tab.locator("thead th", has_text="method").locator("button").press("Enter")
    names = [name.split("\n")[0].lower() for name in column(tab, "method")]
    assert names == sorted(names) and header.get_attribute("aria-sort") == "none"
    tab.locator("thead th", has_text="rank").locator("button").click()
    assert column(tab, "rank")[:3] == ["1", "2", "3"]
    assert set(column(tab, "rank", "published")) == {""}


def test_a_run_of_single_passes_says_so(tab, board):
    for run_id, passes in records.by_run(board.passes).items():
        said = tab.locator(f"tbody[data-kind=measured][data-run='{run_id}'] .group").inner_text()
        assert ("one pass a row" in said) == (len(passes) == len(records.by_row(passes)))
    assert "drift of" in tab.locator(".mark").first.inner_text()


def test_filters(tab, board):
    rows, count = tab.locator(".row:visible"), tab.locator("#count")
    everything = rows.count()
    assert count.inner_text() == f"{everything} of {everything} rows"
    tab.get_by_label("measured only").check()
    assert rows.count() == len(board.rows)
    run_id = board.rows[0].run_id
    of_run = [row for row in board.rows if row.run_id == run_id]
    tab.get_by_label("Run").select_option(run_id)
    assert rows.count() == len(of_run) < len(board.rows)
    shown = [plot for plot in publish.draw(board) if run_id in plot.run_ids]
    assert tab.locator("figure:visible").count() == len(shown) >= 2
    tab.get_by_label("Execution").select_option("compile+cuda_graph")
    kept = [row for row in of_run if row.execution == "compile+cuda_graph"]
    assert rows.count() == len(kept) > 0
    assert count.inner_text() == f"{len(kept)} of {everything} rows"
    tab.get_by_label("Search").fill("no such method")
    assert rows.count() == 0 and tab.locator("#none").is_visible()
    tab.locator("#none button").click()
    assert rows.count() == everything and tab.locator("#none").is_hidden()
    tab.get_by_label("Search").fill("galore h200")
    assert 0 < rows.count() < 10 * len({row.run_id for row in board.rows})
    tab.get_by_label("Search").press("Enter")
    assert tab.url.endswith("index.html"), "Enter must not send the form"


def test_a_record_opens_by_click_and_by_keyboard(tab, board):
    dialog = tab.locator("dialog")
    first = tab.locator("tbody[data-kind=measured] .row").first
    first.locator("td").nth(3).click()
    assert dialog.is_visible()
    top = page.runs_in_order(board.rows)[0][0]
    (record, *_) = [p for p in board.passes if (p.run_id, p.row) == (top.run_id, top.row)]
    text = dialog.inner_text()
    for expected in (record.environment["command"], record.environment["commit"], record.run_id,
                     record.environment["driver"], record.method, "pass"):  # fmt: skip
        assert expected in text, expected
    dialog.locator("summary").first.click()
    shown = dialog.locator("details pre").first.inner_text().split()
    assert [float(ms) for ms in shown] == pytest.approx(record.samples_ms, abs=1e-3)
    dialog.locator("summary", has_text="Log").first.click()
    said = board.logs[record.run_id, record.row, record.repeat]
    assert "-> ok" in said and said.strip() in dialog.inner_text()
    tab.keyboard.press("Escape")
    assert dialog.is_hidden()
    assert tab.evaluate("document.activeElement.closest('.row') !== null"), "the focus is lost"
    tab.keyboard.press("Enter")
    assert dialog.is_visible()
    dialog.get_by_role("button", name="Close").click()
    assert dialog.is_hidden()


def test_hostile_and_published_records_open(tab):
    dialog = tab.locator("dialog")
    for row in (tab.locator("[data-run='2000-01-01_evil'] .row").first,
                tab.locator("[data-kind=published] .row").first):  # fmt: skip
        row.locator("button").click()
        assert dialog.is_visible() and dialog.locator("img, script").count() == 0
        tab.keyboard.press("Escape")
    tab.locator("[data-run='2000-01-01_evil'] .row button").first.click()
    assert dialog.inner_text().count(HOSTILE) >= 3


def test_efficiency_columns_where_there_is_room_and_a_hint_where_not(tab):
    cells, hint = tab.locator("tbody[data-kind=measured] td.extra"), tab.locator(".hint")
    for width, room in ((1280, False), (1440, True)):
        tab.set_viewport_size({"width": width, "height": 800})
        assert cells.first.is_visible() == room and hint.is_visible() != room
    assert len(set(column(tab, "OFU %"))) > 5 and len(set(column(tab, "J / step"))) > 5


def test_rows_of_one_method_can_be_told_apart_on_a_phone(tab, board):
    tab.set_viewport_size({"width": 390, "height": 800})
    rows = tab.locator("tbody[data-kind=measured] .row .method").all_inner_texts()
    texts = [re.sub(r"\s+", " ", text) for text in rows]
    for run in page.runs_in_order(board.rows):
        assert len(set(texts[: len(run)])) == len(run)
        del texts[: len(run)]


@pytest.mark.parametrize("width", [320, 390, 1280, 1440])
def test_nothing_sticks_out(tab, width):
    tab.set_viewport_size({"width": width, "height": 800})
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    region = tab.locator(".scroll")
    if width != 320:
        fits = region.evaluate("e => e.scrollWidth <= e.clientWidth")
        assert fits, "the table must be scrolled sideways"
    for chart in ("figure text", "dialog .chart text"):
        if chart.startswith("dialog"):
            tab.locator(".row button").first.click()
        texts = tab.locator(chart).filter(has_text=re.compile(r"\S"))
        heights = texts.evaluate_all(
            "all => all.map((t) => {"
            " const m = t.getScreenCTM();"
            " return t.getBBox().height * Math.sqrt(Math.abs(m.a * m.d - m.b * m.c)); })"
        )
        assert min(heights) >= 8, f"{chart} cannot be read"
    assert tab.evaluate("document.querySelector('dialog').scrollWidth") <= width
    box = tab.locator("dialog").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= width


def luminance(colour: str) -> float:
    channels = [int(value) / 255 for value in colour[4:-1].split(",")]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(tab, scheme):
    """WCAG AA, 4.5:1, on the page and on a band."""
    tab.emulate_media(color_scheme=scheme)
    back, band = (
        luminance(tab.locator(where).first.evaluate("e => getComputedStyle(e).backgroundColor"))
        for where in ("body", ".group th")
    )
    assert (back > 0.5) == (scheme == "light")
    for where in ("h1", "header p", ".method button", "td.notes", ".mark", "small", "figcaption"):
        colour = luminance(tab.locator(where).first.evaluate("e => getComputedStyle(e).color"))
        for ground in (back, band):
            low, high = sorted((colour, ground))
            assert (high + 0.05) / (low + 0.05) >= 4.5, where


def test_it_reads_without_javascript(browser, address):
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(address)
    assert tab.locator(".row").count() > 20 and tab.locator("figure svg").count() >= 2
    context.close()
