// An answer's text, token by token, with the probabilities of each.

const tip = document.getElementById("tip"), status = document.getElementById("status");
const percent = (logprob) => {
  const value = 100 * Math.exp(logprob);
  return value >= 0.1 ? `${value.toFixed(1)} %` : value > 0 ? `${value.toPrecision(1)} %` : "0 %";
};
const visible = (text) => JSON.stringify(text).slice(1, -1).replaceAll(" ", "␣");

export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// Has a text read out by screen readers, after earlier ones.
export function say(text) {
  status.append(element("p", { textContent: text }));
  if (status.childElementCount > 4) status.firstChild.remove();
}

// The tokens of an event, of either endpoint: text, log-probability, likeliest ones, offset.
export function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content)
    return logprobs.content.map((each) => ({
      text: each.token, logprob: each.logprob, offset: each.text_offset,
      top: each.top_logprobs.map(({ token, logprob }) => [token, logprob]),
    }));
  return logprobs.tokens.map((text, i) => ({
    text, logprob: logprobs.token_logprobs[i], offset: logprobs.text_offset[i],
    top: Object.entries(logprobs.top_logprobs[i]).sort((one, other) => other[1] - one[1]),
  }));
}

export class TokenText {
  constructor(box) {
    this.box = box;
    this.characters = []; // the offsets count them, and not halves of surrogate pairs
    this.tokens = [];
    box.addEventListener("keydown", (event) => this.#move(event));
    for (const kind of ["pointerover", "focusin"])
      box.addEventListener(kind, (event) => this.#show(event.target));
    for (const kind of ["pointerleave", "focusout"]) box.addEventListener(kind, hideTip);
  }

  get text() { return this.characters.join(""); }

  add(text, tokens) {
    const first = Math.max(0, this.tokens.length - 1);
    this.characters.push(...text);
    this.tokens.push(...tokens);
    if (!this.tokens.length) this.box.textContent = this.text;
    for (let i = first; i < this.tokens.length; i++) this.#write(i);
  }

  // Shows the special token that ended the answer, which has no text.
  end() {
    const last = this.tokens.at(-1);
    if (last && !last.span) this.#span(last, "token end", last.text);
  }

  #write(i) {
    const token = this.tokens[i], next = this.tokens[i + 1]?.offset ?? this.characters.length;
    const text = this.characters.slice(token.offset, next).join("");
    if (token.span) token.span.textContent = text;
    else if (text) this.#span(token, "token", text);
  }

  #span(token, className, textContent) {
    const first = !this.box.querySelector(".token");
    token.span = element("span", { className, textContent, tabIndex: first ? 0 : -1 });
    token.span.style.setProperty("--likely", Math.exp(token.logprob).toFixed(3));
    token.span.token = token;
    this.box.append(token.span);
  }

  #move(event) {
    const all = [...this.box.querySelectorAll(".token")], at = all.indexOf(event.target);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (at < 0 || !all[to]) return;
    event.preventDefault();
    all[at].tabIndex = -1;
    all[to].tabIndex = 0;
    all[to].focus();
  }

  #show(target) {
    const token = target.token;
    if (!token) return;
    const row = ([text, logprob]) =>
      element("tr", { className: text === token.text ? "chosen" : "" },
        element("td", { textContent: visible(text) }),
        element("td", { textContent: percent(logprob) }));
    const rows = token.top.map(row);
    if (!token.top.some(([text]) => text === token.text)) rows.push(row([token.text, token.logprob]));
    const caption = element("caption", { textContent: "Before temperature" });
    tip.replaceChildren(element("table", {}, caption, element("tbody", {}, ...rows)));
    tip.hidden = false;
    const box = [...target.getClientRects()].at(-1), own = tip.getBoundingClientRect();
    const below = box.bottom + 6 + own.height < innerHeight;
    tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - own.width - 8))}px`;
    tip.style.top = `${below ? box.bottom + 6 : Math.max(8, box.top - own.height - 6)}px`;
    if (target === document.activeElement)
      say(`${visible(token.text)}: ${percent(token.logprob)}`);
  }
}

export function hideTip() { tip.hidden = true; }
