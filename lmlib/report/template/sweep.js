"use strict";
// The answer of a sweep, and colours by the value of a setting.
const EACH = "each curve", LOSS = "final loss";

const distinct = (setting) => new Set(setting.values).size;
const digits = (x) => (typeof x === "number" && x && Math.abs(x) < 1e-3 ? x.toExponential() : String(x));

// The scale that gives curves their colours: a setting or the final loss. Null for a colour per curve.
function colouring() {
  const { value } = control("colour");
  if (value === LOSS && data.answer) return { ...data.answer, name: data.answer.title, numeric: true };
  if (value) return data.swept.find((each) => each.path === value) ?? null;
  if (data.swept.length > 1 && new Set(data.runs.map(curveOf)).size <= palette().length) return null;
  const numeric = data.swept.filter((each) => each.numeric && distinct(each) > 2);
  return numeric.sort((one, other) => distinct(other) - distinct(one))[0] ?? null;
}

function colourOf(by, run) {
  const place = by.numeric ? -1 : by.ticks.indexOf(by.values[run]);
  if (by.at[run] === null) return styled("--quiet");
  return place >= 0 && by.ticks.length <= palette().length ? palette()[place] : shade(by.at[run]);
}

// The values of the scale with their colours, at most eight.
function key(by) {
  const runs = [...new Map(by.values.map((value, run) => [value, run])).values()]
    .filter((run) => by.at[run] !== null).sort((one, other) => by.at[one] - by.at[other]);
  const step = Math.max(1, (runs.length - 1) / 7);
  const picked = Array.from({ length: Math.min(8, runs.length) }, (_, i) => runs[Math.round(i * step)]);
  return [by.name, ...picked.flatMap((run) => [swatch(colourOf(by, run)), shortened(by.values[run])])];
}

const shortened = (x) => (typeof x === "number" ? digits(Number(x.toPrecision(4))) : x);

function swatch(colour) {
  const made = element("i");
  made.style.background = colour;
  return made;
}

function colourOptions() {
  const known = [["", "automatic"], [EACH, EACH], ...data.swept.map(({ path, name }) => [path, name])];
  if (data.answer) known.push([LOSS, LOSS]);
  const select = control("colour"), { value } = select;
  select.parentElement.hidden = !data.swept.length;
  if (String(known) === select.dataset.known) return;
  select.dataset.known = known;
  select.replaceChildren(...known.map((each) => new Option(each[1], each[0])));
  select.value = known.some((each) => each[0] === value) ? value : "";
}

// The charts of the answer with their specifications, to be drawn.
function drawAnswer() {
  const { answer, swept } = data, todo = [];
  control("answer_section").hidden = !answer;
  if (!answer) return todo;
  const by = colouring(), shades = colours(), [ink, quiet] = ["--text", "--quiet"].map(styled);
  const colourOfCurve = new Map(curves().map((name, i) => [name, shades[i]]));
  const colour = (run) => colourOfCurve.get(curveOf(data.runs[run]));
  const said = (value) => (value === null ? "diverged" : value.toPrecision(6));
  const limit = control("full_range").checked ? null : answer.limit;
  control("answer_text").textContent = answer.text;
  const charts = swept.map((setting, number) => {
    const spec = structuredClone(specifications.against), { x, y } = spec.encoding;
    const lines = answer.lines[number], joined = by && by !== setting && swept.includes(by);
    spec.data.values = answer.values.flatMap((value, i) => value === null && !answer.failed[i] ? [] : [{
      x: setting.values[i], value, failed: answer.failed[i], outlier: limit !== null && value > limit,
      line: lines[i], colour: colour(i), line_colour: joined ? colourOf(by, i) : quiet,
      run: data.runs[i].name, loss: said(value),
    }]);
    x.scale = setting.scale;
    if (!setting.numeric) x.type = "nominal";
    if (!setting.numeric) x.axis = { labelAngle: 0, labelOverlap: true, labelLimit: 110 };
    if (setting.ticks) Object.assign(x.axis, { values: setting.ticks, tickCount: undefined });
    if (limit !== null) y.scale.domainMax = limit;
    if (new Set(lines).size === 1) spec.layer[0].mark.strokeWidth = 2.2;
    const { run, value } = answer.best, best = spec.layer.at(-1);
    best.data.values = [{ x: setting.values[run], value, colour: ink, text: `best ${value.toFixed(4)}` }];
    best.layer[1].mark.align = setting.at[run] < 0.2 ? "left" : setting.at[run] > 0.8 ? "right" : "center";
    const also = setting.also.length ? `changes together with ${setting.also.join(", ")}` : "";
    const [whole, place] = figure(setting.name, "", also, setting.path === setting.name ? "" : setting.path);
    whole.dataset.setting = setting.path;
    todo.push([place, spec]);
    return whole;
  });
  if (answer.parallel.length) {
    const [whole, place] = figure("All settings", "", "a line for each combination: strong if good, thick if best");
    whole.classList.add("broad");
    const loss = { name: answer.title, at: [0, 1], ticks: [0, 1], values: [0, 1] };
    const spec = structuredClone(specifications.parallel), last = answer.parallel.length - 1;
    spec.encoding.x.scale = { domain: [...swept, loss].map((each) => each.name) };
    spec.data.values = answer.parallel.flatMap(({ run, value, at }, rank) =>
      [...swept, loss].map((each, order) => ({
        line: rank, axis: each.name, order, at: each === loss ? at : each.at[run], good: 1 - rank / (last || 1),
        best: rank === 0, colour: colour(run), run: curveOf(data.runs[run]), loss: said(value),
      })));
    const ticks = swept.flatMap((setting) => {
      const all = [...new Map(setting.values.map((value, i) => [value, setting.at[i]]))];
      return all.filter(([, at]) => (setting.ticks && all.length <= 8) || at === 0 || at === 1)
        .map(([value, at]) => ({ axis: setting.name, at, text: shortened(value) }));
    });
    const ends = answer.ends.map((text, at) => ({ axis: loss.name, at, text }));
    const labels = spec.layer.at(-1);
    labels.data.values = [...ticks, ...ends];
    labels.layer.forEach(({ mark }, i) => { mark[i ? "color" : "stroke"] = i ? ink : styled("--panel"); });
    charts.push(whole);
    todo.push([place, spec]);
  }
  control("answer").replaceChildren(...charts);
  return todo;
}
