"""The report: a page from the files that there are, seen in a real browser; clear words for damaged ones."""

from __future__ import annotations

import html
import json
import re
import shutil
import struct
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import report_fixtures

from compressed_ddp.cli import main
from compressed_ddp.report import SOURCES, ReportError, load, make_page, read_table
from compressed_ddp.report.sections import SECTIONS

pytest.importorskip("matplotlib", reason="plots need it")

PICTURES = [picture for section in SECTIONS for picture in section.pictures]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WIDTH, HEIGHT = 1200, 13_400


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report_fixtures.write_all(tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def page(results: Path) -> Path:
    path = results / "report.html"
    assert main(["report", str(results), "-o", str(path), "--pictures", str(results / "pictures")]) == 0
    return path


@pytest.fixture(scope="module")
def real_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the results that are published."""
    folder = Path(__file__).resolve().parents[2] / "results"
    path = tmp_path_factory.mktemp("real") / "report.html"
    assert main(["report", str(folder), "-o", str(path)]) == 0
    return path


class Elements(HTMLParser):
    """Tags with their attributes, in order; and that they are closed."""

    VOID = ("meta", "link", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_has_every_plot_and_its_origin(page: Path) -> None:
    text = page.read_text()
    elements = Elements(text)
    plots = [attributes for tag, attributes in elements.found if tag == "svg"]
    assert [plot["aria-label"] for plot in plots] == [picture.alt for picture in PICTURES]
    figures = re.findall(r'<figure id="(\w+)">.*?<figcaption>(.*?)</figcaption>', text, re.DOTALL)
    assert [name for name, _ in figures] == [picture.name for picture in PICTURES]
    for (_, caption), picture in zip(figures, PICTURES, strict=True):
        assert f"{picture.source}.csv" in caption
        assert report_fixtures.ORIGIN["command"] in caption and report_fixtures.ORIGIN["commit"] in caption
    tables = text.count("<table")
    assert tables == text.count("<caption>") >= 8
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    anchors = {a["href"] for tag, a in elements.found if tag == "a"}
    assert {anchor.lstrip("#") for anchor in anchors if anchor} <= set(ids)
    assert "Not measured yet" not in text and "nan" not in re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL)


def test_what_failed_and_what_was_refused_is_told(page: Path) -> None:
    text = page.read_text()
    assert "does not run here" in text and "16 hosts at 10 Gbit/s: not reported, this machine" in text
    assert "1 of 3 diverged" in text
    assert "8 hosts at 10 Gbit/s, 256 M elements, dilated 10 times" in text


def test_the_page_needs_nothing_else(page: Path) -> None:
    """No script; nothing that refers to another place; and the browser is told to fetch nothing."""
    text = page.read_text()
    for tag, attributes in Elements(text).found:
        assert tag not in ("script", "iframe", "img", "object", "embed")
        for name in ("src", "href", "xlink:href", "srcset", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, name, value)
    assert not re.search(r"url\((?!#)|@import", text)
    assert "default-src 'none'" in text


def test_the_same_files_give_the_same_page(results: Path, page: Path) -> None:
    assert make_page(load(results)) == page.read_text()


def test_pictures_for_documents(page: Path) -> None:
    for picture in PICTURES:
        data = (page.parent / "pictures" / f"{picture.name}.png").read_bytes()
        width, height = struct.unpack(">II", data[16:24])
        assert data.startswith(b"\x89PNG") and width > 400 and height > 300


def test_what_is_not_there_is_named_with_its_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.html"
    assert main(["report", str(tmp_path), "-o", str(out)]) == 0
    text, said = out.read_text(), capsys.readouterr().out
    Elements(text)
    assert "<svg" not in text
    for source in SOURCES.values():
        assert (
            f"<code>{source.file}</code> is not there. This makes it: <code>{source.command}</code>" in text
        )
        assert f"{source.file}; made by: {source.command}" in said


@pytest.mark.parametrize("name", SOURCES)
def test_one_file_alone_is_enough(name: str, results: Path, tmp_path: Path) -> None:
    shutil.copy(results / f"{name}.csv", tmp_path)
    text = make_page(load(tmp_path))
    Elements(text)
    assert text.count("<svg") == sum(picture.source == name for picture in PICTURES)


def test_the_real_results_make_a_page(real_page: Path) -> None:
    text = real_page.read_text()
    Elements(text)
    assert "Not measured yet" not in text


def damage(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new, 1))


@pytest.mark.parametrize("name", SOURCES)
def test_a_lost_column_is_named(
    name: str, results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    column = next(iter(SOURCES[name].columns))
    shutil.copy(results / f"{name}.csv", tmp_path)
    header = (tmp_path / f"{name}.csv").read_text().splitlines()[0]
    damage(tmp_path / f"{name}.csv", header, header.replace(f",{column},", ",other,"))
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "report.html")]) == 1
    assert f"{name}.csv has no column '{column}'" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("50.0", "fast", r"line 2, column 'compute_ms': 'fast' is not a finite number"),
        ("50.0", "nan", r"line 2, column 'compute_ms': 'nan' is not a finite number"),
        ("50.0", "50.0,7", r"line 2 has not \d+ cells"),
        ("an invented machine,", "", r"line 2 has not \d+ cells"),
        ("1gbit", '"1gbit', r"is no CSV file"),
    ],
)
def test_a_damaged_cell_is_named(old: str, new: str, said: str, results: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(results / "scalability_analysis.csv", tmp_path))
    damage(path, old, new)
    with pytest.raises(ReportError, match=said):
        read_table(SOURCES["scalability_analysis"], path)


def test_other_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cost_model.csv"
    for data, said in (
        (b"", "no column"),
        (b"name,unit,value\n", "no rows"),
        (b"name,unit,value\n\xff", "no CSV"),
    ):
        path.write_bytes(data)
        assert main(["report", str(tmp_path), "-o", str(tmp_path / "report.html")]) == 1
        assert said in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nowhere"), "-o", str(tmp_path / "report.html")]) == 1
    assert "is not a folder" in capsys.readouterr().err


def test_text_in_files_is_text_on_the_page(tmp_path: Path) -> None:
    report_fixtures.write(tmp_path / "cost_model.csv", [{"name": "<script>", "value": 1, "unit": "<b>"}])
    text = make_page(load(tmp_path))
    assert "&lt;script&gt;" in text and "<script>" not in text


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser here: install one of {', '.join(BROWSERS)}")
    return found


class Look:
    """Opens pages in the browser, which reaches no network."""

    OPTIONS = (
        *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
        *(
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--window-size={WIDTH},{HEIGHT}",
            "--enable-logging=stderr",
        ),
    )

    def __init__(self, browser: str, folder: Path) -> None:
        self.folder = folder
        self.command = [browser, *self.OPTIONS, f"--user-data-dir={folder / 'profile'}"]

    def run(self, page: Path, *more: str) -> subprocess.CompletedProcess[str]:
        command = [*self.command, *more, page.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)

    def watch(self, page: Path, picture: Path) -> tuple[set[str], bool]:
        """Take a screenshot; what the page asked of others, and whether the console has a word."""
        log = self.folder / "net.json"
        seen = self.run(page, f"--log-net-log={log}", f"--screenshot={picture}")
        asked = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
        # What a browser wants for itself comes from no origin.
        asked = [each for each in asked if each.get("initiator", "not an origin") != "not an origin"]
        return {
            each["url"] for each in asked if not each["url"].startswith("file:")
        }, "CONSOLE" in seen.stderr


# Plots with their size; and what is wider than its place, which a reader would have to scroll.
PROBE = """document.title = JSON.stringify([
  [...document.querySelectorAll('figure svg')].map(plot => {
    const box = plot.getBoundingClientRect();
    return [plot.closest('figure').id, box.width, box.height];
  }),
  [...document.querySelectorAll('.scroll, .frame, body')].filter(
    each => each.scrollWidth > each.clientWidth + 1
  ).map(each => each.getAttribute('aria-label') || each.parentElement.id),
])"""


@pytest.mark.parametrize("which", ["page", "real_page"])
def test_a_browser_shows_it(which: str, browser: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Every plot has its size and nothing is cut off, nothing was asked of any network, and the console is
    silent: with invented figures, and with those that are published."""
    page: Path = request.getfixturevalue(which)
    look, picture = Look(browser, tmp_path), tmp_path / "report.png"
    probe = tmp_path / "probe.html"  # the page's own policy would forbid it a script
    text = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text())
    probe.write_text(text.replace("</body>", f"<script>{PROBE}</script></body>"))
    title = re.search(r"<title>(.*?)</title>", look.run(probe, "--dump-dom").stdout)
    assert title is not None
    sizes, too_wide = json.loads(html.unescape(title[1]))
    assert too_wide == []
    assert [name for name, _, _ in sizes] == [each.name for each in PICTURES]
    assert all(width > 300 and height > 200 for _, width, height in sizes)

    assert look.watch(page, picture) == (set(), False)
    data = picture.read_bytes()
    assert struct.unpack(">II", data[16:24]) == (WIDTH, HEIGHT) and len(data) > 100_000

    # Were there something to see, it would be seen.
    probe.write_text('<img src="http://example.invalid/a"><script>console.log("a word")</script>')
    assert look.watch(probe, picture) == ({"http://example.invalid/a"}, True)
