// The page: models, settings, and a conversation of turns, each with an answer of every model.
import { request, stream } from "./api.js";
import { curl, python } from "./code.js";
import { TokenText, element, hideTip, say, tokensOf } from "./tokens.js";

const $ = (id) => document.getElementById(id);
const TOP = 5; // likeliest tokens that are shown
const models = new Map();
const turns = []; // { said, answers, box, columns }
const running = new Set(); // AbortControllers
const random = () => crypto.getRandomValues(new Uint32Array(1))[0];
const client = `page ${random()}`; // its place in the queue
let completing = false; // true if a chosen model has no chat template

const chosen = () => [$("model").value, $("other").value].filter(Boolean);
const button = (textContent, ariaLabel, onclick) =>
  element("button", { type: "button", textContent, ariaLabel, onclick });
const actionsOf = (...buttons) => element("div", { className: "actions" }, ...buttons);
const stop = () => running.forEach((each) => each.abort());

function choose() {
  const lacking = chosen().filter((name) => !models.get(name).chat);
  completing = lacking.length > 0;
  document.body.classList.toggle("completing", completing);
  $("log").classList.toggle("compared", chosen().length > 1);
  $("system-label").hidden = completing;
  $("prompt").placeholder = $("prompt-label").textContent = completing ? "Text to continue" : "Message";
  $("send").textContent = completing ? "Continue" : "Send";
  const have = `${lacking.join(" and ")} ${lacking.length > 1 ? "have" : "has"}`;
  $("note").textContent = completing
    ? `${have} no chat template: texts are continued, each by itself.` : "";
  restart();
}

function restart() {
  cut(0);
  $("prompt").focus();
}

// Removes the turns from this number on.
function cut(number) {
  stop();
  hideTip();
  for (const each of turns.splice(number)) each.box.remove();
}

// The request for the answer of a model in the last turn.
function asked(model, column) {
  const settings = { seed: random() };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"])
    if ($(name).value !== "") settings[name] = Number($(name).value);
  if (completing) return { model, prompt: turns.at(-1).said, ...settings };
  const messages = [];
  if ($("system").value.trim()) messages.push({ role: "system", content: $("system").value });
  for (const turn of turns) {
    messages.push({ role: "user", content: turn.said });
    const answer = turn.answers[column];
    if (turn !== turns.at(-1) && answer) messages.push({ role: "assistant", content: answer.text });
  }
  return { model, messages, ...settings };
}

function send(said) {
  if (!said.trim() || !models.size) return false;
  if (!$("settings").checkValidity()) {
    showSettings(true);
    $("settings").reportValidity();
    return false;
  }
  stop();
  const number = turns.length + 1, turn = { said, answers: [] };
  const mine = element("section", { className: "mine", ariaLabel: `Message ${number}` },
    element("p", { className: "said", textContent: said }),
    actionsOf(button("Edit", `Edit message ${number}`, () => edit(turn, mine))));
  turn.columns = element("div", { className: "answers" });
  turn.box = element("article", { className: "turn" }, mine, turn.columns);
  turns.push(turn);
  $("log").append(turn.box);
  $("prompt").focus();
  chosen().forEach((model, column) => answer(turn, model, column));
  toEnd();
  return true;
}

function edit(turn, mine) {
  const field = element("textarea", { value: turn.said, rows: 3, ariaLabel: "Edited message" });
  const before = [...mine.childNodes];
  const back = () => {
    mine.replaceChildren(...before);
    mine.querySelector("button").focus();
  };
  const save = () => {
    if (!field.value.trim()) return;
    cut(turns.indexOf(turn));
    send(field.value);
  };
  field.onkeydown = (event) => {
    if (event.key === "Escape") back();
    if (event.key === "Enter" && !event.shiftKey && !completing) event.preventDefault(), save();
  };
  mine.replaceChildren(field, actionsOf(
    button("Send again", "Send the edited message", save), button("Cancel", "Cancel the edit", back)));
  field.focus();
}

async function answer(turn, model, column) {
  const number = turns.indexOf(turn) + 1, chat = !completing, body = asked(model, column);
  const text = new TokenText(element("div", { className: "text" }));
  const about = element("p", { className: "about" }), actions = actionsOf();
  const box = element("section", { className: "answer", ariaLabel: `Answer ${number} of ${model}`, ariaBusy: "true" },
    element("h3", { textContent: model }), text.box, about, actions);
  if (turn.answers[column]) turn.answers[column].box.replaceWith(box);
  else turn.columns.append(box);
  turn.answers[column] = { box, get text() { return text.text; } };
  const controller = new AbortController(), began = performance.now();
  running.add(controller);
  showRunning();
  say(`${model} is answering`);
  let ended = "stopped", failed = "";
  try {
    for await (const event of events(chat, body, controller.signal)) {
      const choice = event.choices[0], follows = atEnd(80);
      text.add((chat ? choice.delta.content : choice.text) ?? "", tokensOf(choice.logprobs));
      ended = choice.finish_reason ?? ended;
      if (follows) toEnd();
    }
    if (ended === "stop") text.end();
  } catch (error) {
    if (error.name !== "AbortError") failed = error.message;
  }
  running.delete(controller);
  showRunning();
  const seconds = ((performance.now() - began) / 1000).toFixed(1);
  const why = { length: ", at the maximum", stopped: ", stopped" }[ended] ?? "";
  about.textContent = failed || `${text.tokens.length} tokens in ${seconds} s${why} · seed ${body.seed}`;
  about.classList.toggle("wrong", failed !== "");
  const add = (name, verb, onclick) =>
    actions.append(button(name, `${verb} answer ${number} of ${model}`, onclick));
  add("Retry", "Retry", () => {
    cut(turns.indexOf(turn) + 1);
    $("prompt").focus();
    answer(turn, model, column);
  });
  add("Copy", "Copy", (event) => copy(text.text, event.target));
  add("Code", "Show as code", () => showCode(chat, body));
  if (!chat) add("Go on", "Go on from", () => send(turn.said + text.text));
  say(failed || `${model}: ${text.text.slice(0, 1000)}`);
  if (atEnd(200)) toEnd();
  box.ariaBusy = "false";
}

async function* events(chat, body, signal) {
  const path = chat ? "/v1/chat/completions" : "/v1/completions";
  const logprobs = chat ? { logprobs: true, top_logprobs: TOP } : { logprobs: TOP };
  const begin = () => stream(path, { ...body, ...logprobs, stream: true, user: client }, signal);
  try {
    yield* begin();
  } catch (error) {
    if (!chat || error.code !== "context_length_exceeded" || !body.max_tokens) throw error;
    delete body.max_tokens; // then the answer may fill the rest
    yield* begin();
  }
}

function showRunning() {
  $("stop").hidden = !running.size;
  $("send").hidden = running.size > 0;
}

const main = document.querySelector("main");
const atEnd = (margin) => main.scrollHeight - main.scrollTop - main.clientHeight < margin;
const toEnd = () => (main.scrollTop = main.scrollHeight);

async function copy(text, from) {
  const before = from.textContent, copied = navigator.clipboard?.writeText(text) ?? Promise.reject();
  // Browsers allow it only on this machine and with https.
  from.textContent = await copied.then(() => "Copied", () => "Not allowed");
  say(from.textContent);
  setTimeout(() => (from.textContent = before), 1500);
}

function showCode(chat, body) {
  $("python").textContent = python(chat, body);
  $("curl").textContent = curl(chat, body);
  $("code-dialog").showModal();
}

function showSettings(visible) {
  $("settings").hidden = !visible;
  $("settings-button").ariaExpanded = visible;
}

$("settings-button").onclick = () => showSettings($("settings").hidden);
$("settings").onsubmit = (event) => event.preventDefault();
$("coloured").onchange = () => $("log").classList.toggle("coloured", $("coloured").checked);
$("new").onclick = restart;
$("stop").onclick = () => { stop(); $("prompt").focus(); };
$("model").onchange = $("other").onchange = choose;
$("composer").onsubmit = (event) => {
  event.preventDefault();
  const said = $("prompt").value;
  if (running.size) return;
  $("prompt").value = "";
  if (!send(said)) $("prompt").value = said;
};
$("prompt").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
};
document.onkeydown = (event) => {
  if (event.key !== "Escape") return;
  hideTip();
  if (!document.querySelector("dialog[open]")) stop();
};
for (const each of document.querySelectorAll("[data-copies]"))
  each.onclick = () => copy($(each.dataset.copies).textContent, each);
try {
  const found = await (await request("/v1/models")).json();
  for (const each of found.data) {
    models.set(each.id, each);
    for (const list of ["model", "other"]) $(list).add(new Option(each.id));
  }
  $("other").add(new Option("none", "", true, true), 0);
  $("other-label").hidden = models.size < 2;
  choose();
} catch (error) {
  $("note").textContent = error.message;
}
