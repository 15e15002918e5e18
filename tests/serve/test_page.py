"""The chat page in a real browser: what it shows and sends, and that it never executes or fetches model output."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

from jingu.infer.inference_model import InferenceModel
from jingu.serve.app import SECURITY_HEADERS, load_static_files
from tests.limits import PATIENCE
from tests.serve.browser import Browser, find_browser
from tests.serve.conftest import ScriptedEngine, Serve
from tests.serve.scripted import Scripted

ANSWERS = "[...document.querySelectorAll('.assistant .body')].map((each) => each.innerText)"
DONE = "document.querySelector('#stop').hidden && document.querySelector('#thread li:last-child .tools button')"
MESSAGES = "[...document.querySelectorAll('#thread .body')].map((each) => each.innerText)"


class PageSession:
    """A browser at the page, whose server answers with `says`."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        self.says: Iterable[str | dict[str, Any]] = ["Hello."]
        self.go_on = threading.Event()
        self.go_on.set()
        self.server = Scripted(self._answer)

    def _answer(self, body: dict[str, Any]) -> Iterator[str | dict[str, Any]]:
        for piece in self.says:
            if piece == "[WAIT]":
                self.go_on.wait()
            else:
                yield piece

    def open(self) -> None:
        self.browser.open(f"{self.server.url}/chat")
        self.browser.until("document.querySelector('#model').value && document.activeElement.id === 'input'")

    def say(self, text: str) -> None:
        """Send a message, and wait for the complete answer."""
        self.browser.type(text)
        self.browser.press("Enter")
        self.browser.until(DONE)

    def pick(self, box: str, value: str) -> None:
        """Select an option."""
        script = "(box, value) => { box.value = value; box.dispatchEvent(new Event('change', { bubbles: true })); }"
        self.browser.run(f"({script})(document.querySelector('{box}'), '{value}')")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium is installed")
    result = Browser(program, tmp_path_factory.mktemp("profile"))
    yield result
    result.close()


@pytest.fixture
def talk(browser: Browser) -> Iterator[PageSession]:
    row = PageSession(browser)
    row.open()
    yield row
    complaints = browser.complaints()
    outside = [url for url in browser.asked() if not url.startswith((row.server.url, "blob:"))]
    row.server.shutdown()
    row.server.server_close()
    assert complaints == []
    assert outside == []


def test_the_files_load_nothing_external_and_create_no_markup_from_text() -> None:
    result = load_static_files()
    assert set(result) >= {"/chat", "/chat/main.js", "/chat/style.css"}
    for name, page in result.items():
        text = bytes(page.body).decode()
        assert not re.search(r"(src|href|import|from|url)\W{1,3}(https?:)?//", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text), (
            name
        )
    assert (
        "unsafe" not in SECURITY_HEADERS["Content-Security-Policy"]
        and "default-src 'none'" in SECURITY_HEADERS["Content-Security-Policy"]
    )


def test_an_answer_streams_and_renders_as_markdown(talk: PageSession) -> None:
    talk.go_on.clear()
    talk.says = ["A **bold** wo", "rd, 中", "文 🙂\n\n```py\nx = 1", "[WAIT]", "2\n```\n"]
    browser = talk.browser
    browser.type("A question\nof two lines")
    browser.press("Enter")
    browser.until("document.querySelector('.assistant code')?.textContent === 'x = 1'")
    assert browser.run("[!document.querySelector('#stop').hidden, document.querySelector('#send').hidden]") == [
        True,
        True,
    ]
    assert browser.run("document.querySelector('#status').textContent") == "The model is answering."
    assert browser.run("document.querySelector('#thread').getAttribute('aria-busy')") == "true"
    talk.go_on.set()
    browser.until(DONE)
    assert browser.run("document.querySelector('.assistant strong').textContent") == "bold"
    assert browser.run("document.querySelector('.assistant code').textContent") == "x = 12"
    assert browser.run("document.querySelector('.user .body').textContent") == "A question\nof two lines"
    assert "中文 🙂" in browser.run(ANSWERS)[0]
    assert browser.run("document.querySelector('#status').textContent") == "The answer is complete."
    assert "7 tokens" in browser.run("document.querySelector('.assistant .tools').innerText")
    (body,) = talk.server.asked
    assert body == {
        "messages": [{"role": "user", "content": "A question\nof two lines"}],
        "model": "small",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


HOSTILE = """<script>window.hit = 1</script><img src=x onerror="window.hit = 2">

<iframe src="http://elsewhere.invalid/a"></iframe><svg onload="window.hit = 3"></svg>

[one](javascript:window.hit=4) [two](JaVaScRiPt:window.hit=5) [three](data:text/html,<script>window.hit=6</script>)
[four](vbscript:x) <javascript:window.hit=7> [good](https://good.invalid/?q=<b>) [five](  javascript:window.hit=8)
![seen](http://elsewhere.invalid/b.png) ![x](x" onerror="window.hit=9) [six](https://a.invalid" onclick="window.hit=10)

```html"><script>window.hit=11</script>
</code></pre><script>window.hit = 12</script>
```

| <img src=x onerror=window.hit=13> | <b>b</b> |
|---|---|
| `<script>window.hit=14</script>` | **<style>*{display:none}</style>** |

# <svg/onload=window.hit=15>
1. <details open ontoggle=window.hit=16>
> <form action=http://elsewhere.invalid/c><input autofocus onfocus=window.hit=17>
&lt;script&gt;window.hit=18&lt;/script&gt; <base href=http://elsewhere.invalid/> <meta http-equiv=refresh content=0>
"""


def test_model_output_is_never_executed_or_fetched(talk: PageSession) -> None:
    """Written by the model, by the user (whose message becomes a title), or in settings."""
    talk.says = [HOSTILE[start : start + 11] for start in range(0, len(HOSTILE), 11)]
    browser = talk.browser
    talk.say(HOSTILE)
    talk.open()
    browser.until("document.querySelector('.assistant table')")
    assert browser.run("window.hit") is None
    inside = "#thread :is(script, img, iframe, svg, style, form, input, base, meta, details, object, embed, video)"
    assert browser.run(f"document.querySelectorAll('{inside}').length") == 0
    links = browser.run("[...document.querySelectorAll('#thread a')].map((each) => each.href)")
    assert {re.match("[a-z]+:", item)[0] for item in links} == {"https:", "http:"}  # type: ignore[index]
    assert "https://good.invalid/?q=%3Cb%3E" in links or "https://good.invalid/?q=" in " ".join(links)
    attributes = "[...document.querySelectorAll('#thread *')].flatMap((each) => each.getAttributeNames())"
    assert not [name for name in browser.run(attributes) if name.startswith("on") or name in ("style", "src")]
    for word in ("<script>window.hit = 1</script>", "<svg/onload=window.hit=15>", "&lt;script&gt;"):
        assert word in browser.run(ANSWERS)[0]
    assert browser.run("document.querySelectorAll('#thread a:not([rel~=noopener])').length") == 0


def test_the_content_security_policy_blocks_scripts(talk: PageSession) -> None:
    browser = talk.browser
    script = """(async () => {
      const refused = [];
      const attempt = (name, change) => { try { change(); } catch (error) { refused.push(`${name} ${error.name}`); } };
      attempt("markup", () => (document.body.innerHTML = "<b>x</b>"));
      attempt("handler", () => document.body.setAttribute("onclick", "window.hit = 1"));
      attempt("script", () => (document.createElement("script").text = "window.hit = 2"));
      const seen = new Set();
      document.addEventListener("securitypolicyviolation", (event) => seen.add(event.effectiveDirective));
      const image = document.createElement("img");
      image.src = "http://127.0.0.1:9/x.png";
      const frame = document.createElement("iframe");
      frame.src = "http://127.0.0.1:9/";
      document.body.append(image, frame);
      await fetch("http://127.0.0.1:9/").catch(() => {});
      const wanted = ["connect-src", "frame-src", "img-src"];
      for (let count = 0; count < 1000 && !wanted.every((each) => seen.has(each)); count++)
        await new Promise((done) => setTimeout(done, 10));
      image.remove();
      frame.remove();
      return [refused, wanted.filter((each) => seen.has(each))];
    })()"""
    refused, blocked = browser.run(script)
    assert refused == ["markup TypeError", "handler TypeError", "script TypeError"]
    assert blocked == ["connect-src", "frame-src", "img-src"]
    assert browser.run("window.hit") is None
    browser.events.clear()  # What was blocked is complained of.


def test_stop_regenerate_and_edit_keep_all_versions(talk: PageSession) -> None:
    browser, server = talk.browser, talk.server
    talk.go_on.clear()
    talk.says = chain(["First, half", "[WAIT]"], repeat(" said" * 1000))
    browser.type("Question one")
    browser.press("Enter")
    browser.until("document.querySelector('.assistant .body').innerText.includes('half')")
    browser.press("Escape")
    browser.until(DONE)
    talk.go_on.set()
    assert server.gone.acquire(timeout=PATIENCE)  # The server sees that nobody listens.
    assert browser.run(ANSWERS) == ["First, half"]
    assert "Stopped." in browser.run("document.querySelector('.assistant .tools').innerText")

    talk.says = ["Second."]
    browser.press("KeyR", "Alt")
    browser.until("document.querySelector('.versions') && document.querySelector('#stop').hidden")
    assert browser.run(ANSWERS) == ["Second."]
    assert server.asked[-1]["messages"] == [{"role": "user", "content": "Question one"}]
    talk.say("Question two")
    text = [message["content"] for message in server.asked[-1]["messages"]]
    assert text == ["Question one", "Second.", "Question two"]

    # Up in the empty input edits the last message; the answer to what it was stays in its own branch.
    talk.says = ["Third."]
    browser.press("ArrowUp")
    browser.until("document.activeElement.closest('.editor')")
    browser.run("document.activeElement.select()")
    browser.type("Question two, better")
    browser.press("Enter")
    browser.until(f"({MESSAGES}).at(-1) === 'Third.' && {DONE}")
    assert browser.run(MESSAGES) == ["Question one", "Second.", "Question two, better", "Third."]
    browser.run("document.querySelectorAll('.versions')[1].querySelector('button').click()")
    assert browser.run(MESSAGES) == ["Question one", "Second.", "Question two", "Second."]
    browser.run("document.querySelectorAll('.versions')[0].querySelector('button').click()")
    assert browser.run(MESSAGES) == ["Question one", "First, half"]
    browser.run("document.querySelectorAll('.versions button')[1].click()")
    assert browser.run(MESSAGES) == ["Question one", "Second.", "Question two, better", "Third."]


def test_an_edited_answer_is_sent_to_the_model(talk: PageSession) -> None:
    talk.say("One")
    browser = talk.browser
    browser.run(
        "[...document.querySelectorAll('.assistant .tools button')].find((each) => each.textContent === 'Edit').click()"
    )
    browser.until("document.activeElement.closest('.editor')")
    browser.run("document.activeElement.select()")
    browser.type("What I would rather hear.")
    browser.press("Enter")
    browser.until("!document.querySelector('.editor')")
    talk.say("Two")
    assert talk.server.asked[-1]["messages"][1] == {"role": "assistant", "content": "What I would rather hear."}


def test_conversations_are_stored_renamed_and_deleted(talk: PageSession) -> None:
    browser = talk.browser
    names = "[...document.querySelectorAll('#list .name')].map((each) => each.textContent)"
    talk.say("Apples")
    browser.press("KeyN", "Alt")
    talk.say("Pears")
    assert browser.run(names) == ["Pears", "Apples"]
    browser.press("ArrowDown", "Alt")
    assert browser.run(MESSAGES) == ["Apples", "Hello."]
    talk.open()
    assert browser.run(names) == ["Pears", "Apples"]
    assert browser.run(MESSAGES) == ["Pears", "Hello."]
    browser.dialogs.append("Fruit")
    browser.run("document.querySelector('#list [title=Rename]').click()")
    assert browser.run(names) == ["Fruit", "Apples"] and browser.run("document.title") == "Fruit – jingu"
    browser.dialogs += [None, ""]
    browser.run("document.querySelector('#list [title=Delete]').click()")
    assert browser.run(names) == ["Fruit", "Apples"]
    browser.run("document.querySelector('#list [title=Delete]').click()")
    assert browser.run(names) == ["Apples"] and browser.run(MESSAGES) == ["Apples", "Hello."]
    talk.open()
    assert browser.run(names) == ["Apples"]


def test_only_settings_with_values_are_sent(talk: PageSession) -> None:
    browser = talk.browser
    browser.press("Comma", "Alt")
    browser.until("document.querySelector('#settings').open && document.activeElement.name === 'system'")
    browser.type("Be brief.")
    for name, value in (("temperature", "0.3"), ("max_tokens", "17"), ("seed", "5"), ("top_p", "7"), ("key", "secret")):
        browser.run(f"document.querySelector('[name={name}]').focus()")
        browser.type(value)
    browser.run("document.querySelector('[name=system]').focus()")
    browser.press("Escape")
    browser.until("!document.querySelector('#settings').open")
    talk.pick("#model", "large")
    browser.run("document.querySelector('#input').focus()")
    talk.say("Now")
    body = talk.server.asked[-1]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    expected = {"model": "large", "temperature": 0.3, "max_tokens": 17, "seed": 5}
    assert {key: body.get(key) for key in (*expected, "top_p")} == {**expected, "top_p": None}  # 7 is no probability.
    assert talk.server.keys[-1] == "Bearer secret"
    assert "secret" not in browser.run("JSON.stringify(localStorage)")
    talk.open()
    browser.press("KeyN", "Alt")
    talk.say("Again")
    assert talk.server.asked[-1]["temperature"] == 0.3 and talk.server.asked[-1]["model"] == "large"
    browser.run("sessionStorage.clear()")


def test_a_conversation_is_exported(talk: PageSession, tmp_path: Path) -> None:
    browser = talk.browser
    talk.says = ["It is `x < 1`.\n"]
    talk.say("What is it? 什么")
    browser.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path), eventsEnabled=True)
    for kind in ("md", "json"):
        talk.pick("#export", kind)
        browser.wait("Browser.downloadProgress", lambda output: output["state"] == "completed")
    assert json.loads((tmp_path / "What-is-it-什么.json").read_text(encoding="utf-8")) == {
        "title": "What is it? 什么",
        "settings": {},
        "messages": [
            {"role": "user", "content": "What is it? 什么"},
            {"role": "assistant", "content": "It is `x < 1`.\n"},
        ],
    }
    text = (tmp_path / "What-is-it-什么.md").read_text(encoding="utf-8")
    assert text == "# What is it? 什么\n\n## You\n\nWhat is it? 什么\n\n## Model\n\nIt is `x < 1`.\n\n"


def test_errors_are_shown_and_can_be_retried(talk: PageSession) -> None:
    browser = talk.browser
    fault = "document.querySelector('.assistant .error')?.textContent"
    talk.says = [{"status": 429, "body": {"error": {"message": "the queue is full.", "type": "overloaded"}}}]
    talk.say("One")
    assert browser.run(fault) == "429: the queue is full."
    talk.says = ["Half of", "[BREAK]"]
    browser.press("KeyR", "Alt")
    browser.until(f"({fault})?.includes('was lost')")
    assert browser.run(ANSWERS) == ["Half of"]
    talk.says = ["Half", {"error": {"message": "the model has stumbled."}}]
    browser.press("KeyR", "Alt")
    browser.until(f"({fault}) === 'the model has stumbled.'")
    talk.says = ["Well."]
    browser.press("KeyR", "Alt")
    browser.until(f"({ANSWERS})[0] === 'Well.' && {DONE}")
    assert browser.run(fault) is None
    browser.events = [item for item in browser.events if item["method"] != "Log.entryAdded"]  # The status 429.


def test_suggestions_on_the_empty_screen(talk: PageSession) -> None:
    browser = talk.browser
    texts = browser.run("[...document.querySelectorAll('#starters button')].map((each) => each.innerText)")
    assert len(texts) == 4 and len(set(texts)) == 4
    browser.run("document.querySelectorAll('#starters button')[1].click()")
    browser.until(DONE)
    assert browser.run(MESSAGES) == [texts[1], "Hello."]
    assert talk.server.asked[-1]["messages"] == [{"role": "user", "content": texts[1]}]
    assert browser.run("document.querySelector('#empty').hidden")


@pytest.mark.parametrize("width", [320, 390])
def test_the_title_has_room_on_a_phone(talk: PageSession, width: int, tmp_path: Path) -> None:
    talk.say("A question with a long title that does not fit")
    try:
        talk.browser.look(tmp_path / "phone.png", width=width, height=640)
        boxes = "[...document.querySelectorAll('h1, header > *')].map((each) => each.getBoundingClientRect())"
        title = talk.browser.run("document.querySelector('h1').getBoundingClientRect().toJSON()")
        assert title["width"] > 0.6 * width
        assert talk.browser.run(f"{boxes}.every((box) => box.left >= 0 && box.right <= {width})")
        assert talk.browser.run("document.documentElement.scrollWidth") <= width
    finally:
        talk.browser.send("Emulation.clearDeviceMetricsOverride")


def test_the_page_speaks_chinese_to_a_chinese_browser(talk: PageSession) -> None:
    browser = talk.browser
    browser.send("Emulation.setUserAgentOverride", userAgent="test", acceptLanguage="zh-CN")
    try:
        talk.open()
        assert browser.run("[document.documentElement.lang, document.querySelector('#send').ariaLabel]") == [
            "zh-CN",
            "发送",
        ]
        assert browser.run("document.querySelector('#input').placeholder") == "输入消息"
        rendered = browser.run(
            "document.body.innerText + [...document.querySelectorAll('*')].map((each) => each.ariaLabel ?? '')"
        )
        assert "undefined" not in rendered
    finally:
        browser.send("Emulation.setUserAgentOverride", userAgent="test", acceptLanguage="en-GB")


def test_controls_have_labels_and_colors_have_contrast(talk: PageSession) -> None:
    browser = talk.browser
    talk.says = ["Text with a [link](https://a.invalid) and\n\n```\ncode\n```"]
    talk.say("One")
    browser.press("KeyR", "Alt")
    browser.until(f"document.querySelector('.versions') && {DONE}")
    for dialog in (False, True):
        if dialog:
            browser.press("Comma", "Alt")
        tree = browser.send("Accessibility.getFullAXTree")["nodes"]
        roles = {"button", "textbox", "combobox", "spinbutton", "link", "dialog", "list", "navigation", "region"}
        nameless = [
            node["role"]["value"]
            for node in tree
            if not node["ignored"]
            and node["role"]["value"] in roles - {"list"}
            and not node.get("name", {}).get("value")
        ]
        assert nameless == []
    browser.press("Escape")
    ratios = """(() => {
      const light = (text) => text.match(/[\\d.]+/g).slice(0, 3).map((each) => each / 255)
        .map((each) => (each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4))
        .reduce((sum, each, place) => sum + each * [0.2126, 0.7152, 0.0722][place], 0);
      const probe = document.createElement("p");
      document.body.append(probe);
      const colour = (name) => { probe.style.color = `var(--${name})`; return light(getComputedStyle(probe).color); };
      const found = [];
      for (const text of ["text", "quiet", "accent", "error"])
        for (const ground of ["ground", "raised"]) {
          const [high, low] = [colour(text), colour(ground)].sort((a, b) => b - a);
          found.push((high + 0.05) / (low + 0.05));
        }
      probe.remove();
      return Math.min(...found);
    })()"""
    for scheme in ("light", "dark"):
        browser.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        assert browser.run(ratios) >= 4.5  # WCAG 2.2, AA
    browser.send("Emulation.setEmulatedMedia", features=[])


MARKDOWN = [
    "A *b* **c** `d` ***e*** _f_ __g__ snake_case_name 2 * 3 * 4\nnext line",
    "# One\ntext\n\n### Three ###\n####### seven",
    "- a\n- b\n  - c\n    - d\n- e\n\n1. one\n2. two\n   - inner\n3. three",
    "5. five\n6. six",
    "- a\n\n  second paragraph\n\n- b",
    "1. Do this:\n   ```sh\n   ls -l\n     indented\n   ```\n2. Then that",
    "```python\ndef f():\n\n    return '**not bold**'\n```\nafter",
    "~~~\n```\n~~~",
    "```\nnever closed\n# no heading",
    "> a\n> b\n>\n> - c\n\nout",
    "---\n\n***\n\ntext\n\n- - -",
    '[a](https://a.invalid/x_y_z) and [**b**](https://b.invalid/ "title") \\*kept\\* \\_this\\_',
    "``a ` b`` and `` ` `` and ` c `",
    "text\n- list right after\n\ntext\n# heading right after",
    "a\n\n\n\nb",
    "<b>not bold</b> & < > \" '",
    "| a | b |\n|---|:-:|\n| 1 | `x \\| y` |\n| 2 |\n\nend",
    "中文**粗体**和`代码`。\n\n- 一\n- 二",
    "* star\n* star\n\n+ plus",
    "~~gone~~ here",
]


class _Outline(HTMLParser):
    """Return elements and texts, without attributes and layout elements."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        link = next((value for name, value in attributes if tag == "a" and name == "href"), None)
        self.found.append(f"<{tag} {link}>" if link else f"<{tag}>")

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("br", "hr"):
            self.found.append(f"</{tag}>")

    def handle_data(self, text: str) -> None:
        if text.strip():
            self.found.append(text.strip("\n"))


def outline(html: str) -> str:
    """Normalize loose lists and heading levels to those of the page."""
    parser = _Outline()
    parser.feed(re.sub(r"</?(thead|tbody)>", "", html))
    text = re.sub(r"\s*\n\s*", "\n", "".join(parser.found))
    return re.sub(r"(<li>)<p>(.*?)</p>", r"\1\2", text, flags=re.DOTALL)


def test_markdown_equals_the_reference(talk: PageSession) -> None:
    markdown_it = pytest.importorskip("markdown_it", reason="markdown-it-py is not installed")
    reference = markdown_it.MarkdownIt("commonmark", {"breaks": True, "html": False}).enable(["table", "strikethrough"])
    script = """(async (texts) => {
      const { showMarkdown } = await import("/chat/markdown.js");
      const { strings } = await import("/chat/strings.js");
      return texts.map((text) => {
        const place = document.createElement("div");
        showMarkdown(place, text, strings);
        for (const code of place.querySelectorAll(".code")) code.replaceWith(code.querySelector("pre"));
        for (const table of place.querySelectorAll(".table")) table.replaceWith(table.firstChild);
        return place.innerHTML;
      });
    })"""
    result = talk.browser.run(f"{script}({json.dumps(MARKDOWN)})")
    for text, html in zip(MARKDOWN, result, strict=True):
        deeper = re.sub(r"(</?h)(\d)", lambda match: f"{match[1]}{min(6, int(match[2]) + 2)}", reference.render(text))
        assert outline(html) == outline(deeper.replace("<s>", "<del>").replace("</s>", "</del>")), text


def test_streamed_markdown_equals_complete_markdown(talk: PageSession) -> None:
    """Blocks above the last one also keep their nodes, so that selections survive."""
    script = """(async (texts) => {
      const { showMarkdown } = await import("/chat/markdown.js");
      const { strings } = await import("/chat/strings.js");
      const differ = [];
      for (const text of texts) {
        const growing = document.createElement("div");
        for (let end = 0; end <= text.length; end++) {
          showMarkdown(growing, text.slice(0, end), strings);
          if (end % 5 && end < text.length) continue;
          const whole = document.createElement("div");
          showMarkdown(whole, text.slice(0, end), strings);
          if (whole.innerHTML !== growing.innerHTML) differ.push(text.slice(0, end));
        }
      }
      const place = document.createElement("div");
      showMarkdown(place, "first\\n\\n```\\ncode", strings);
      const [first, second] = place.children;
      showMarkdown(place, "first\\n\\n```\\ncode and more\\n```\\n\\nlast", strings);
      return [differ, place.children[0] === first && place.children[1] === second && place.children.length === 3];
    })"""
    assert talk.browser.run(f"{script}({json.dumps([*MARKDOWN, HOSTILE])})") == [[], True]


def test_unclosed_and_deeply_nested_markup_is_shown(talk: PageSession) -> None:
    script = """(async () => {
      const { showMarkdown } = await import("/chat/markdown.js");
      const { strings } = await import("/chat/strings.js");
      const texts = ["*", "**a ", "_a", "`", "[", "![](", "~~x", "http://", "<", "| a ", "> ", "- ", "  - a\\n", "1. "];
      const lost = [];
      for (const text of texts) {
        const place = document.createElement("div");
        showMarkdown(place, text.repeat(3000), strings);
        if (text.includes("a") && !place.textContent.includes("a")) lost.push(text);
      }
      return lost;
    })()"""
    assert talk.browser.run(script) == []


def test_the_page_with_the_real_server(browser: Browser, serve: Serve, tiny_model: InferenceModel) -> None:
    """Uses every setting that the page can send."""
    running = serve(ScriptedEngine(tiny_model, lambda prompt: "**the** weather 的🙂"))
    browser.open(f"{running.url}/chat")
    browser.until("document.querySelector('#model').value === 'tiny'")
    numbers = {
        "temperature": 0.5,
        "max_tokens": 50,
        "top_p": 0.9,
        "seed": 3,
        "presence_penalty": 1,
        "frequency_penalty": 1,
    }
    for name, value in {**numbers, "system": "fine"}.items():
        script = "(box, value) => { box.value = value; box.dispatchEvent(new Event('change', { bubbles: true })); }"
        browser.run(f"({script})(document.querySelector('#settings [name={name}]'), '{value}')")
    browser.run("document.querySelector('#input').focus()")
    browser.type("how is it")
    browser.press("Enter")
    browser.until(DONE)
    assert browser.run(ANSWERS) == ["the weather 的🙂"]
    assert browser.run("document.querySelector('.assistant strong').textContent") == "the"
    assert "tokens" in browser.run("document.querySelector('.assistant .tools').innerText")
    assert browser.complaints() == []


def test_reasoning_is_folded_and_not_sent_back(talk: PageSession) -> None:
    talk.go_on.clear()
    talk.says = [
        {"choices": [{"index": 0, "delta": {"reasoning_content": "First **think**"}, "finish_reason": None}]},
        "[WAIT]",
        {"choices": [{"index": 0, "delta": {"reasoning_content": " more."}, "finish_reason": None}]},
        "The answer.",
    ]
    browser = talk.browser
    browser.type("Why?")
    browser.press("Enter")
    browser.until("document.querySelector('.reasoning summary')?.textContent === 'Reasoning…'")
    talk.go_on.set()
    browser.until(DONE)
    assert browser.run(ANSWERS) == ["The answer."]
    fold = "(({open, innerText}) => [open, innerText])(document.querySelector('.reasoning'))"
    assert browser.run(fold) == [False, "Reasoning"]
    browser.run("document.querySelector('.reasoning').open = true")
    assert browser.run("document.querySelector('.reasoning > div').innerText") == "First think more."
    talk.says = ["Fine."]
    talk.say("And?")
    sent = [(message["role"], message["content"]) for message in talk.server.asked[-1]["messages"]]
    assert sent == [("user", "Why?"), ("assistant", "The answer."), ("user", "And?")]
    assert all("reasoning_content" not in message for message in talk.server.asked[-1]["messages"])


def test_each_block_has_the_direction_of_its_text(talk: PageSession) -> None:
    talk.says = ["שלום `x = 1` עולם.\n\n- مرحبا بالعالم\n- English\n\nplain text\n\n## כותרת\n"]
    talk.say("ما هذا؟")
    direction = "getComputedStyle(document.querySelector('.assistant .body > {}')).direction"
    for place, expected in (("p", "rtl"), ("ul", "rtl"), ("p:nth-of-type(2)", "ltr"), ("h4", "rtl")):
        assert talk.browser.run(direction.format(place)) == expected, place
    assert talk.browser.run("getComputedStyle(document.querySelector('.user .body')).direction") == "rtl"
    # The words before the code stand on its right.
    places = talk.browser.run(
        "(() => { const range = document.createRange(); const p = document.querySelector('.assistant .body p');"
        " range.selectNode(p.firstChild); const left = (part) => part.getBoundingClientRect().left;"
        " return [left(range), left(p.querySelector('code'))]; })()"
    )
    assert places[0] > places[1]


def test_task_lists_have_boxes(talk: PageSession) -> None:
    talk.says = ["- [x] done\n- [ ] open\n- [y] no task\n"]
    talk.say("List")
    boxes = (
        "[...document.querySelectorAll('.assistant li')].map((item) => item.querySelector('input')?.checked ?? null)"
    )
    assert talk.browser.run(boxes) == [True, False, None]
    assert talk.browser.run(ANSWERS) == ["done\nopen\n[y] no task"]


@pytest.mark.parametrize(
    ("text", "formulas"),
    [
        ("Area \\(\\pi r^2\\).", 1),
        ("So $E = mc^2$, and $x$.", 2),
        ("$$\n\\frac{a}{b}\n$$", 1),
        ("\\[\n\\int_0^1 x\\,dx\n\\]\nafter", 1),
        ("It costs $5 or $10, about US$ 7.", 0),
        ("`$x$` and ```$y$```", 0),
        ("An open $x + y", 0),
        ("Bad $\\frac{$ one", 0),
    ],
)
def test_formulas_are_shown(talk: PageSession, text: str, formulas: int) -> None:
    talk.says = [text]
    talk.say("Formula")
    count = "document.querySelectorAll('.assistant math').length"
    if formulas:
        talk.browser.until(f"{count} === {formulas}")
    else:
        assert talk.browser.run(count) == 0
        assert talk.browser.run("document.querySelector('.assistant .body').innerText").replace(
            "`", ""
        ) == text.replace("`", "")


def test_formulas_cannot_carry_markup(talk: PageSession) -> None:
    talk.says = ["$\\text{<img src=x onerror=alert(1)>}$ and $\\href{javascript:alert(1)}{x}$"]
    talk.say("Formula")
    talk.browser.until("document.querySelector('.assistant math')")
    assert talk.browser.run("document.querySelectorAll('.assistant img, .assistant a, .assistant [href]').length") == 0


def test_long_formulas_scroll_on_a_phone(talk: PageSession) -> None:
    talk.says = ["$$" + "+".join(f"x_{{{number}}}" for number in range(60)) + "$$\n\n- [x] done"]
    talk.say("Formula")
    talk.browser.until("document.querySelector('.assistant math')")
    assert talk.browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert talk.browser.run(
        "(({scrollWidth, clientWidth}) => scrollWidth > clientWidth)(document.querySelector('div.math'))"
    )
