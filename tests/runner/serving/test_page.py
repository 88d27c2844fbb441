"""The chat page in a real Chromium: by mouse and by keyboard alone, wide and narrow.

Needs `chromium` or `google-chrome` on the PATH, and the package playwright.
"""

import re
import shutil

import pytest
from running_server import is_idle, running_server, until

openai = pytest.importorskip("openai", reason="needs lmlib[test]")
pytest.importorskip("uvicorn", reason="needs lmlib[serve]")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
expect = playwright.expect
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on the PATH"),
]
SECONDS = 60_000
# The contrast of each element that has text of its own, and its beginning.
CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const each of colours) { canvas.fillStyle = each; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const luminance = (colours) => {
    const [r, g, b] = rgb(colours).map((value) => {
      const c = value / 255;
      return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((each) => each.nodeType === 3 && each.data.trim());
    if (!(own || element.placeholder) || !element.checkVisibility()) continue;
    const grounds = [];
    for (let at = element; at; at = at.parentElement)
      grounds.unshift(getComputedStyle(at).backgroundColor);
    const style = getComputedStyle(element, own ? null : "::placeholder");
    const [one, other] = [luminance(grounds), luminance([...grounds, style.color])];
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    found.push([ratio, element.outerHTML.slice(0, 120)]);
  }
  return found;
}"""


STOP_AT_FIRST_TOKEN = """() => new MutationObserver((_, observer) => {
  if (!document.querySelector(".token")) return;
  observer.disconnect();
  document.getElementById("stop").click();
}).observe(document.getElementById("log"), { childList: true, subtree: true })"""


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


class Opened:
    """A page, and the lines of its console."""

    def __init__(self, browser, url, width=1280, height=800, **settings):
        viewport = {"width": width, "height": height}
        self.context = browser.new_context(viewport=viewport, **settings)
        self.page, self.console, self.sent = self.context.new_page(), [], []
        self.page.on("console", lambda message: self.console.append(message.text))
        self.page.on("pageerror", lambda error: self.console.append(str(error)))
        self.page.on("request", self._note)
        self.page.goto(url)

    def _note(self, request):
        if request.method == "POST":
            self.sent.append(request.post_data_json)

    def use(self, model, **settings):
        expect(self.page.locator("#model option")).to_have_count(2)
        self.page.select_option("#model", model)
        if self.page.locator("#settings").is_hidden():
            self.page.click("#settings-button")
        for name, value in settings.items():
            self.page.fill(f"#{name}", str(value))

    def say(self, text):
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")
        self.finish()

    def finish(self):
        expect(self.page.locator(".answer[aria-busy=false]").last).to_be_attached(timeout=SECONDS)
        expect(self.page.locator(".answer[aria-busy=true]")).to_have_count(0, timeout=SECONDS)

    def texts(self, selector):
        return self.page.locator(selector).all_text_contents()


@pytest.fixture
def opened(browser, served):
    found = Opened(browser, served.url)
    yield found
    found.context.close()
    assert not found.console


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_streams_retries_and_edits(opened, client):
    opened.use("chatty", max_tokens=12, seed=5, temperature=1)
    for text in ("The river?", "And the boat?"):
        opened.say(text)
    assert opened.texts(".said") == ["The river?", "And the boat?"]
    first, second = opened.texts(".text")
    asked = opened.sent[-1]
    assert [each["content"] for each in asked["messages"]] == ["The river?", first, "And the boat?"]
    settings = {name: asked[name] for name in ("model", "messages", "seed", "temperature")}
    answer = client.chat.completions.create(**settings, top_p=0.95, max_tokens=12)
    assert answer.choices[0].message.content == second
    opened.page.click("text=Retry >> nth=0")  # of the first answer: the second turn goes
    opened.finish()
    assert opened.texts(".text") == [first]  # with the same seed
    opened.page.fill("#seed", "6")
    opened.page.click("text=Retry")
    opened.finish()
    assert opened.texts(".text") != [first]
    opened.page.click("text=Edit >> nth=0")
    opened.page.fill(".mine textarea", "The mill?")
    opened.page.keyboard.press("Enter")
    opened.finish()
    assert opened.texts(".said") == ["The mill?"] and len(opened.sent[-1]["messages"]) == 1


def test_an_answer_stops_and_its_slot_is_free(opened, served):
    opened.use("base", max_tokens=240)
    opened.page.evaluate(STOP_AT_FIRST_TOKEN)
    opened.say("The river runs")
    assert "stopped" in opened.texts(".about")[0]
    assert len(opened.texts(".token")) < 240
    until(lambda: is_idle(served.service))
    assert opened.page.is_visible("#send") and opened.page.is_hidden("#stop")


def test_a_model_without_a_template_continues_texts_beside_another(opened, client):
    opened.use("chatty", max_tokens=8, temperature=0)
    assert opened.page.is_visible("#system")
    opened.page.select_option("#other", "base")
    assert opened.page.is_hidden("#system")
    expect(opened.page.locator("#note")).to_contain_text("base has no chat template")
    opened.say("The river runs past")
    found = opened.texts(".text")
    for model, text in zip(("chatty", "base"), found, strict=True):
        settings = {"model": model, "prompt": "The river runs past", "max_tokens": 8}
        answer = client.completions.create(**settings, temperature=0)
        assert answer.choices[0].text == text
    boxes = [each.bounding_box() for each in opened.page.locator(".answer").all()]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] < boxes[1]["x"]
    opened.page.click("text=Go on >> nth=1")
    opened.finish()
    assert opened.texts(".said")[1] == "The river runs past" + found[1]


def test_probabilities_by_mouse_and_by_keyboard(opened, client):
    opened.use("base", max_tokens=8, temperature=0)
    opened.say("Où est la")
    answer = client.completions.create(
        model="base", prompt="Où est la", max_tokens=8, temperature=0, logprobs=5
    ).choices[0]
    tokens = opened.texts(".token")
    assert "".join(tokens) == answer.text
    opened.page.hover(".token >> nth=1")
    rows = opened.texts("#tip tr td:last-child")
    expected = sorted(answer.logprobs.top_logprobs[1].values())[-1]
    assert len(rows) == 5
    assert float(rows[0].split()[0]) == pytest.approx(100 * 2.718281828**expected, abs=0.06)
    opened.page.mouse.move(0, 0)
    expect(opened.page.locator("#tip")).to_be_hidden()
    opened.page.locator("#prompt").focus()
    for _ in range(6):
        opened.page.keyboard.press("Shift+Tab")
        if opened.page.locator(".token:focus").count():
            break
    assert opened.texts(".token:focus") == tokens[:1]
    opened.page.keyboard.press("ArrowRight")
    assert opened.texts(".token:focus") == tokens[1:2]
    assert opened.texts("#tip tr td:last-child") == rows
    expect(opened.page.locator("#status")).to_contain_text("%")
    opened.page.keyboard.press("Escape")
    expect(opened.page.locator("#tip")).to_be_hidden()


def test_text_is_never_interpreted_as_html(opened):
    evil = "<img src=x onerror=alert(1)><script>alert(1)</script>"
    opened.use("chatty", max_tokens=2)
    opened.page.fill("#system", "")
    opened.say(evil)
    assert opened.texts(".said") == [evil]
    assert opened.page.locator("#log img, #log script").count() == 0


def test_a_system_prompt_is_sent_and_an_error_is_shown(browser, served):
    opened = Opened(browser, served.url)
    opened.use("chatty", max_tokens=3, system="Be brief.")
    opened.say("Hello")
    assert opened.sent[-1]["messages"][0] == {"role": "system", "content": "Be brief."}
    expect(opened.page.locator(".wrong")).to_contain_text("the chat template cannot take these")
    opened.page.fill("#system", "")
    opened.page.click("text=Retry")
    opened.finish()
    assert opened.texts(".text")[0] and not opened.texts(".wrong")
    opened.context.close()


def test_the_shown_code_gives_the_same_answer(opened, tmp_path):
    opened.use("chatty", max_tokens=10)
    opened.say('It\'s "quoted"\\ and\nbroken')
    (text,) = opened.texts(".text")
    opened.page.click("text=Code")
    code = opened.page.text_content("#python")
    file = tmp_path / "code.py"
    file.write_text(code.replace("print(", "found = ("))
    found = {}
    exec(compile(file.read_text(), file, "exec"), found)
    assert found["found"] == text
    assert "curl " in opened.page.text_content("#curl")
    opened.page.keyboard.press("Escape")
    assert opened.page.locator("dialog[open]").count() == 0


def test_the_key_is_asked_for_and_kept_for_the_tab(browser, models):
    with running_server(models, 256, "secret", length=256) as served:
        opened = Opened(browser, served.url)
        for key in ("wrong", "secret"):
            expect(opened.page.locator("#key-dialog")).to_be_visible()
            opened.page.fill("#key", key)
            opened.page.keyboard.press("Enter")
        opened.use("chatty", max_tokens=3)
        opened.say("Hello")
        assert opened.texts(".text")[0]
        opened.page.reload()
        expect(opened.page.locator("#model option")).to_have_count(2)
        assert opened.page.is_hidden("#key-dialog")
        opened.context.close()


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_every_text_has_contrast_and_nothing_is_cut_off(browser, served, width, colours):
    opened = Opened(browser, served.url, width, 740, color_scheme=colours, bypass_csp=True)
    opened.use("chatty", max_tokens=10)
    opened.page.select_option("#other", "base")
    opened.page.check("#coloured")
    opened.say("The river runs past the old mill and under the stone bridge " * 2)
    opened.page.locator(".token").nth(2).hover()
    found = opened.page.evaluate(CONTRASTS)
    assert len(found) > 20
    assert not [each for each in found if each[0] < 4.5]
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    sizes = [each.bounding_box() for each in opened.page.locator("button:visible").all()]
    assert all(each["x"] >= 0 and each["x"] + each["width"] <= width for each in sizes)
    assert all(each["height"] >= 24 for each in sizes)  # to touch: WCAG 2.2, 2.5.8
    opened.context.close()


def test_every_control_has_a_name_and_the_page_a_structure(opened):
    opened.use("chatty", max_tokens=3)
    opened.say("Hello")
    tree = opened.page.locator("body").aria_snapshot()
    unnamed = re.findall(
        r"^\s*- (?:button|textbox|combobox|spinbutton|checkbox)(?::|$)", tree, re.M
    )
    assert not unnamed, tree
    for role in ("main", "banner", "heading", "log", "status"):
        assert re.search(rf"- {role}\b", tree), tree


def test_everything_works_by_keyboard_alone(opened):
    expect(opened.page.locator("#model option")).to_have_count(2)
    expect(opened.page.locator("#prompt")).to_be_focused()
    opened.page.keyboard.type("The river")
    opened.page.keyboard.press("Enter")
    opened.finish()
    seen = set()
    for _ in range(40):
        opened.page.keyboard.press("Tab")
        focused = opened.page.evaluate(
            "(document.activeElement.ariaLabel || document.activeElement.id ||"
            " document.activeElement.className)"
        )
        seen.add(focused)
    names = {"model", "other", "settings-button", "new", "prompt", "token", "Edit message 1"}
    names |= {f"{verb} answer 1 of chatty" for verb in ("Retry", "Copy", "Show as code")}
    assert names <= seen
