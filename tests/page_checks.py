"""What every page of ours is held to: tags that balance, nothing that acts or asks for anything, and a browser to show it."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

VOID = {"meta", "link", "img", "br", "hr", "input"}
EVIL = [
    "</pre><script>document.body.remove()</script>", '"><img src=x onerror=alert(1)>', "' onmouseover='alert(1)",
    "<svg onload=alert(1)>", "</style><script>1</script>", "]]><script>1</script>", "&lt;script&gt;", "<!-- ", "javascript:alert(1)",
    "\ud800\x00\x1b[31m\u202ednuora", "$\\frac{1}{2}$ ${HOME}", "<iframe src=//evil.example>",
]


class Page(HTMLParser):
    """Collects elements, attributes and text; checks that tags are balanced."""

    def __init__(self, path: Path):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text, self.open = "", []
        self.feed(path.read_text("utf-8"))
        self.close()
        assert not self.open, f"unclosed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data

    def check_inert(self):
        assert not {"script", "iframe", "img", "object", "embed", "link", "base", "form", "a"} & set(self.tags)
        for name, value in self.attributes:
            assert not name.startswith("on"), (name, value)
            assert name not in ("src", "href", "action", "xlink:href") or (value or "").startswith("#"), (name, value)

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")


def shown_by_chromium(path: Path, folder: Path, height: int = 1600) -> tuple[str, Path]:
    """What a real browser makes of a page, its DOM as text and a screenshot, ``height`` pixels tall."""
    shot = folder / "shot.png"
    out = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={folder}/profile",
         "--virtual-time-budget=3000", f"--window-size=1200,{height}", f"--screenshot={shot}", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert "</html>" in out.stdout, out.stderr[-1000:]
    return out.stdout, shot


def check_self_contained(source: str) -> None:
    """A policy that forbids everything, and no address but the names of SVG."""
    policy = re.search(r'Content-Security-Policy" content="([^"]*)', source)
    assert policy and policy[1].startswith("default-src 'none'")
    addresses = set(re.findall(r"https?://[^\s\"'<]+", source))
    assert addresses <= {"http://www.w3.org/1999/xlink", "http://www.w3.org/2000/svg"}
    assert "@import" not in source and "@font-face" not in source
