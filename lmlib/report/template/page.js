// Draws the charts of the page from its data, as the controls say. Text goes into the page as text.
const read = (id) => JSON.parse(document.getElementById(id).textContent);
const specifications = read("specifications");
const control = (id) => document.getElementById(id);
const hidden = new Set(); // curves that the legend has switched off, by name
const { dull } = control("charts").dataset; // the group of charts that is folded at first
const folded = new Set([dull]); // groups, by name
let data = unpacked(read("data"));
let views = [], curveViews = []; // all, and those of curves with their specifications
let drawing = 0;

// Axis values are there once, and series have their places: here these become the values again.
function unpacked(read) {
  for (const { series } of read.charts)
    for (const each of series)
      for (const { value } of control("axis").options)
        if (value in each) each[value] = read.axes[each[value]];
  return read;
}

const hasSeeds = () => (data.hasSeeds ??= new Set(data.runs.map((run) => run.group)).size < data.runs.length);
const bySeed = () => hasSeeds() && control("seeds").checked;
const curveOf = (run) => (bySeed() ? run.group : run.name);
function curves() { // by name, in the order of their colours
  const by = colouring(), places = new Map();
  data.runs.forEach((run, i) => {
    if (!places.has(curveOf(run))) places.set(curveOf(run), by ? by.at[i] ?? 2 : 0);
  });
  return [...places.keys()].sort((one, other) => places.get(one) - places.get(other));
}
const isDark = () =>
  (document.documentElement.dataset.theme ??
    (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

const palette = () => specifications.colours[isDark() ? "dark" : "light"];

// A colour for each curve.
function colours() {
  const by = colouring(), names = curves();
  const runs = new Map(data.runs.map((run, i) => [curveOf(run), i]).reverse());
  if (by) return names.map((name) => colourOf(by, runs.get(name)));
  return names.length <= palette().length ? palette() : names.map((_, i) => shade(i / (names.length - 1)));
}

// The colour at a position from 0 to 1: between two colours of the scale.
function shade(position) {
  const scale = specifications.sequential[isDark() ? "dark" : "light"];
  const at = position * (scale.length - 1), i = Math.min(Math.floor(at), scale.length - 2);
  const channels = [1, 3, 5].map((from) => {
    const [low, high] = [scale[i], scale[i + 1]].map((each) => parseInt(each.slice(from, from + 2), 16));
    return Math.round(low + (at - i) * (high - low)).toString(16).padStart(2, "0");
  });
  return `#${channels.join("")}`;
}

const styled = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function theme() {
  const [text, line, font] = ["--text", "--line", "font-family"].map(styled);
  return {
    background: null,
    range: { category: palette() },
    font,
    view: { stroke: null },
    axis: { labelColor: text, titleColor: text, gridColor: line, domainColor: line,
            tickColor: line, titleFontWeight: "normal" },
    legend: { labelColor: text, titleColor: text },
  };
}

// The seconds per unit of an axis of wall time, or 1; and the title of the axis.
function unitOf(axis) {
  if (axis !== "seconds") return [1, control("axis").selectedOptions[0].textContent];
  const last = Math.max(0, ...data.charts.flatMap((chart) => chart.series.map((each) => each.seconds?.at(-1) ?? 0)));
  const [size, name] = last > 7200 ? [3600, "h"] : last > 300 ? [60, "min"] : [1, "s"];
  return [size, `wall time (${name})`];
}

// The rows of a chart: a row for each point of each curve that is shown.
function rows(chart, axis, size, logX, logY) {
  const found = [];
  let left = 0;
  for (const series of chart.series) {
    if (leftOut.has(series.run)) continue;
    const curve = curveOf(data.runs[series.run]);
    if (hidden.has(curve) || !series[axis]) continue;
    series.value.forEach((value, i) => {
      const x = series[axis][i] / size;
      if ((logX && x <= 0) || (logY && value !== null && value <= 0)) left += 1;
      if (logX && x <= 0) return;
      found.push({
        curve, x, value, step: series.step[i], stretch: Math.floor((series.step[i] - 1) / chart.stretch),
        not_finite: series.not_finite?.[i] ?? 0,
        least: series.least ? series.least[i] : value,
        greatest: series.greatest ? series.greatest[i] : value,
      });
    });
  }
  return [found, left];
}

function curveSpecification(chart) {
  const axis = control("axis").value;
  const [logX, logY] = [control("log_x").checked, control("log_y").checked];
  const spec = structuredClone(specifications.curves);
  const [size, title] = unitOf(axis);
  const [found, left] = rows(chart, axis, size, logX, logY);
  spec.data.values = found;
  const points = Math.max(...chart.series.map((series) => series.value.length));
  const around = Math.floor((Number(control("smoothing").value) / 100) * points / 2);
  spec.transform[2].frame = [-around, around];
  const { x, y, color } = spec.encoding;
  color.scale = { domain: curves(), range: colours() };
  x.title = title;
  if (logX) x.scale = specifications.logarithmic.scale;
  if (logY) y.scale = specifications.logarithmic.scale;
  if (logY) spec.transform.splice(1, 0, ...specifications.logarithmic.transform);
  if (chart.whole && !logY) {
    y.axis.tickMinStep = 1;
    y.axis.gridOpacity = y.axis.tickOpacity = { condition: { test: "datum.value % 1", value: 0 }, value: 1 };
    y.axis.labelExpr = `datum.value % 1 ? '' : ${y.axis.labelExpr}`;
  }
  if (axis !== "seconds" && !logX) x.axis.tickMinStep = 1;
  if (chart.unit === "B") y.axis.labelExpr = y.axis.labelExpr.replace("'B'", "'G'"); // bytes
  const limits = control("full_range").checked ? [] : chart.limits;
  limits.forEach((limit, i) => {
    if (limit !== null && (limit > 0 || !logY)) spec.params[i].value = limit;
  });
  for (const end of ["Min", "Max"])
    for (const [name, channel] of [["x", x], ["y", y]])
      channel.scale = { ...channel.scale, [`domain${end}`]: { expr: `${name}_${end.toLowerCase()}` } };
  const shown = axisEnds(spec);
  for (const each of spec.params) each.value = shown[each.name] ?? each.value;
  const ends = new Map();
  for (const { run, step } of chart.series.filter((each) => !leftOut.has(each.run))) {
    const curve = curveOf(data.runs[run]);
    ends.set(curve, (ends.get(curve) ?? new Set()).add(step.at(-1)));
  }
  const fewer = bySeed() && [...ends.values()].some((each) => each.size > 1);
  const several = bySeed() || chart.stretch > 1;
  spec.layer.at(-1).encoding.tooltip = said({
    run: "point.curve",
    step: number("step", 12),
    value: number("value", 6),
    ...(axis !== "step" && { [x.title]: number("x", 12) }),
    ...(around > 0 && { smoothed: number("smooth", 6) }),
    ...(several && { min: number("least", 6), max: number("greatest", 6) }),
    ...(bySeed() && { runs: "point.runs + ' of ' + point.most" }),
  });
  return [spec, found.some((row) => row.value > 0 || !logY), left, fewer];
}

// The range of x that is shown; null for all.
function zoom() {
  const [from, to] = control("zoom").value.split(",").map(Number);
  const isRange = from < to && Number.isFinite(to - from) && (from > 0 || !control("log_x").checked);
  return isRange ? [from, to] : null;
}

// The ends of a chart's axes: of the zoom and the values in it that are no outliers. Null for all.
function axisEnds({ data: { values }, params, encoding }) {
  const [below, above] = params.map((each) => each.value), range = zoom();
  let [low, high] = [Infinity, -Infinity];
  for (const { x, least, greatest } of range ? values : [])
    for (const each of x < range[0] || x > range[1] ? [] : [least, greatest])
      if (each !== null && each >= below && each <= above && (each > 0 || encoding.y.scale.type !== "log"))
        [low, high] = [Math.min(low, each), Math.max(high, each)];
  if (low > high) [low, high] = [below, above].map((each) => (Math.abs(each) < 1.7e308 ? each : null));
  return { x_min: range?.[0] ?? null, x_max: range?.[1] ?? null, y_min: low, y_max: high };
}

// Shows a range of x in all charts of curves; null for all.
function zoomTo(range) {
  control("zoom").value = range ? range.map((each) => each.toPrecision(12)).join() : "";
  control("unzoom").hidden = !range;
  toAddress();
  for (const [view, spec] of curveViews) {
    for (const [name, value] of Object.entries(axisEnds(spec))) view.signal(name, value);
    view.runAsync();
  }
}

let drag = null; // the chart over which the pointer is dragged, and where that began

function zoomable(view) {
  const canvas = view.container().querySelector("canvas");
  const at = ({ clientX }) => {
    const x = clientX - canvas.getBoundingClientRect().left - view.origin()[0] - view.padding().left;
    return Math.min(Math.max(x, 0), view.width());
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button === 0) drag = { view, at, from: at(event) };
  });
  canvas.addEventListener("dblclick", () => zoomTo(null));
}

function dragging(event) {
  if (!drag) return;
  const { view, at, from } = drag, goesOn = event.type === "pointermove";
  const places = [from, at(event)].sort((a, b) => a - b);
  view.signal("dragged", goesOn ? places : null).runAsync();
  if (goesOn) return;
  drag = null;
  if (event.type === "pointerup" && places[1] - places[0] > 4)
    zoomTo(places.map((each) => view.scale("x").invert(each)));
}

// A tooltip: titles, and expressions of a point or of the cell around it.
const number = (field, digits) => `format(point.${field}, ',.${digits}~g')`;
function said(rows) {
  const text = Object.entries(rows).map(([title, each]) => `${JSON.stringify(title)}: ${each}`);
  return { value: { expr: `{${text}}`.replaceAll("point.", "(datum.datum || datum).") } };
}

// Bars or a map of rows, whose height is that of each value of a field.
function specificationOf(name, rows, field) {
  const spec = structuredClone(specifications[name]);
  spec.data.values = rows;
  spec.height *= new Set(rows.map((row) => row[field])).size;
  return spec;
}

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function figure(title, unit, text, key) {
  const made = element("figure");
  const caption = element("figcaption");
  caption.append(element("strong", title), element("span", unit ? ` ${unit}` : "", "unit"));
  if (key) caption.append(" ", element("code", key, "quiet"));
  caption.append(element("small", text));
  const place = element("div", undefined, "plot");
  made.append(caption, place);
  return [made, place];
}

// The text that titles or keys of charts must contain; it opens the groups of those.
const searched = () => control("search").value.trim().toLowerCase();
const isOpen = (name) => !folded.has(name) || searched() !== "";

// A group of charts that can be folded. A folded one is drawn when it opens.
function group(name, charts) {
  const made = element("details"), title = element("summary"), place = element("div", undefined, "charts");
  title.append(element("h2", name));
  const short = (x) => (x && Math.abs(x) < 1e-3 ? x.toExponential(1)
    : x.toLocaleString("en", { maximumSignificantDigits: 4 }));
  const range = (each) => `${each.metric} ${each.range.map(short).join(" to ")}`;
  if (name === dull) title.append(element("span", charts.map(range).join(", "), "quiet"));
  made.append(title, place);
  made.open = isOpen(name);
  made.addEventListener("toggle", () => {
    if (made.open !== folded.has(name) || searched()) return;
    if (made.open) folded.delete(name);
    else folded.add(name);
    drawAll();
  });
  return [made, place];
}

async function draw(place, spec) {
  const options = { actions: { export: true, source: false, compiled: false, editor: false },
                    ast: true, config: theme(), renderer: "canvas", mode: "vega-lite",
                    logLevel: 1, tooltip: { theme: isDark() ? "dark" : "light" } };
  const many = spec.params && spec.data.values.length > MANY && withPaths(spec);
  if (many) await pause();
  const { view } = await vegaEmbed(place, many ? many.spec : spec, { ...options, ...(many && { patch: many.patch }) });
  views.push(view);
  if (!spec.params) return;
  if (many) followPointer(view, many.points);
  curveViews.push([view, spec]);
  zoomable(view);
  view.addSignalListener("hover", (_, { x }) => { // one cursor for all charts of curves
    for (const [each] of curveViews)
      if (distance(each.container()) < innerHeight) each.signal("pointed_at", x?.[0] ?? null).runAsync();
  });
}

function legend() {
  const place = control("legend"), by = colouring();
  place.replaceChildren();
  if (by && curves().length > palette().length) {
    const values = element("p", undefined, "key");
    values.append(...key(by));
    place.append(values);
  }
  const shades = colours();
  const shown = new Set(data.runs.filter((_, i) => !leftOut.has(i)).map(curveOf));
  curves().forEach((name, i) => {
    if (!shown.has(name)) return;
    const label = element("label");
    const box = Object.assign(element("input"), { type: "checkbox", checked: !hidden.has(name) });
    box.addEventListener("change", () => {
      if (box.checked) hidden.delete(name);
      else hidden.add(name);
      drawAll();
    });
    label.append(box, swatch(shades[i]), name);
    place.append(label);
  });
  place.hidden = curves().length < 2;
  control("seeds").parentElement.hidden = !hasSeeds();
  control("full_range").parentElement.hidden =
    !data.charts.some((chart) => chart.limits.some((limit) => limit !== null)) && !data.answer?.limit;
  control("unzoom").hidden = !zoom();
}

async function drawAll() {
  const turn = ++drawing;
  colourOptions();
  arrange();
  legend();
  const around = window.scrollY;
  const made = { charts: document.createDocumentFragment(), layers: document.createDocumentFragment() };
  const todo = drawAnswer();
  const groups = new Map();
  const charts = data.charts.filter(({ title, metric }) =>
    [title, metric].some((each) => each.toLowerCase().includes(searched())));
  for (const name of new Set(charts.map((chart) => chart.group))) {
    groups.set(name, group(name, charts.filter((chart) => chart.group === name)));
    made.charts.append(groups.get(name)[0]);
  }
  if (!charts.length && searched())
    made.charts.append(element("p", `No metric contains “${searched()}”.`, "nothing"));
  for (const chart of charts) {
    if (!isOpen(chart.group)) continue;
    const [whole, place] = figure(chart.title, chart.unit, chart.text, chart.metric);
    whole.dataset.metric = chart.metric;
    groups.get(chart.group)[1].append(whole);
    todo.push([place, () => { // when the chart comes near
      const [spec, shown, left, fewer] = curveSpecification(chart);
      const notes = [chart.text];
      if (chart.stretch > 1) notes.push(`each point is the mean of ${chart.stretch.toLocaleString("en")} steps, with a band from min to max`);
      if (fewer) notes.push("dashed: mean of fewer runs");
      if (left) notes.push(`${left} points are not positive and have no place on a logarithmic axis`);
      whole.querySelector("small").textContent = notes.filter(Boolean).join(" · ");
      if (!shown) place.replaceChildren(element("p", "no points on these axes", "nothing"));
      return shown && spec;
    }]);
  }
  for (const layers of data.layers) {
    const [whole, place] = figure(layers.statistic, layers.run, layers.text);
    made.layers.append(whole);
    const rows = layers.rows.filter((row) => row.value > 0);
    todo.push([place, specificationOf("heat", rows, "part")]);
  }
  const old = views;
  views = [];
  curveViews = [];
  control("charts").replaceChildren(made.charts);
  control("layers").replaceChildren(made.layers);
  control("layers_section").hidden = !data.layers.length;
  control("goodput_section").hidden = !data.goodput.length;
  if (data.goodput.length) {
    const spec = specificationOf("bars", data.goodput, "run");
    spec.encoding.color.legend.columns = control("goodput").clientWidth < 600 ? 2 : 8;
    control("goodput").replaceChildren();
    todo.push([control("goodput"), spec]);
  }
  window.scrollTo(0, around);
  for (const view of old) view.finalize();
  await drawNear(new Map(todo), turn);
}

// The pixels from the screen to an element; 0 if a part of it can be seen.
function distance(element) {
  const { top, bottom } = element.getBoundingClientRect();
  return Math.max(0, top - innerHeight, -bottom);
}

const pause = (ms = 0) => new Promise((resolve) => setTimeout(resolve, ms));

let scrolled = -Infinity; // when the page last did
addEventListener("scroll", () => { scrolled = performance.now(); });

// Draws the nearest charts first, between movements of the page, since drawing would hold them up;
// those farther than a screen once nobody has scrolled for a while.
async function drawNear(todo, turn) {
  while (todo.size) {
    const nearest = [...todo.keys()].reduce((one, other) => (distance(other) < distance(one) ? other : one));
    if (distance(nearest) > innerHeight) {
      document.documentElement.dataset.drawn = String(turn);
      const before = scrollY;
      await pause(300);
      if (scrollY !== before) continue;
    } else if (performance.now() - scrolled < 100) {
      await pause(50);
      continue;
    }
    const made = todo.get(nearest), spec = typeof made === "function" ? made() : made;
    todo.delete(nearest);
    await pause();
    if (turn !== drawing) return;
    if (spec) await draw(nearest, spec);
    if (turn !== drawing) return;
  }
  document.documentElement.dataset.drawn = String(turn);
}

// The state of the controls is in the address after "#", to be kept or given to others.
const CONTROLS = ["axis", "smoothing", "log_x", "log_y", "full_range", "seeds", "search", "zoom", "filter", "colour"];

function fromAddress() {
  colourOptions();
  const state = new URLSearchParams(location.hash.slice(1));
  for (const id of CONTROLS.filter((each) => state.has(each)))
    if (control(id).type === "checkbox") control(id).checked = state.get(id) === "1";
    else control(id).value = state.get(id);
  for (const [id, usual] of [["axis", "step"], ["colour", ""]]) if (!control(id).value) control(id).value = usual;
  const theme = state.get("theme");
  if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
}

function toAddress() {
  const state = new URLSearchParams();
  for (const id of CONTROLS)
    state.set(id, control(id).type === "checkbox" ? Number(control(id).checked) : control(id).value);
  if (document.documentElement.dataset.theme)
    state.set("theme", document.documentElement.dataset.theme);
  history.replaceState(null, "", `#${state}`);
}

function changed() {
  toAddress();
  drawAll();
}

function setUp() {
  fromAddress();
  const smoothing = () => { control("smoothing_text").textContent = `${control("smoothing").value} %`; };
  control("smoothing").addEventListener("input", smoothing);
  smoothing();
  control("axis").addEventListener("change", () => { control("zoom").value = ""; });
  let waiting;
  for (const each of CONTROLS.map(control))
    each.addEventListener(each.type === "search" ? "input" : "change", () => {
      clearTimeout(waiting);
      waiting = setTimeout(changed, each.type === "search" ? 200 : 0);
    });
  for (const type of ["pointermove", "pointerup", "pointercancel"])
    document.addEventListener(type, dragging);
  control("unzoom").addEventListener("click", () => zoomTo(null));
  control("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  drawAll();
}

// The live page asks for itself again, and takes over what has changed; the controls stay.
async function refresh(seconds) {
  await new Promise((resolve) => setTimeout(resolve, seconds * 1000));
  try {
    const answer = await fetch(location.href, { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.statusText);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    document.body.classList.remove("lost");
    const text = page.getElementById("data").textContent;
    document.title = page.title;
    for (const part of document.querySelectorAll("[data-live]")) {
      const next = page.getElementById(part.id); // what has not changed stays, open or closed
      for (const each of next.querySelectorAll("details[id]"))
        each.open = control(each.id)?.open ?? each.open;
      if (next.textContent !== part.textContent) part.replaceWith(document.adoptNode(next));
    }
    arrange();
    if (text !== control("data").textContent) {
      control("data").textContent = text;
      data = unpacked(JSON.parse(text));
      await drawAll();
    }
  } catch (error) {
    document.body.classList.add("lost");
  }
  refresh(seconds);
}

setUp();
if (document.body.dataset.refresh) refresh(Number(document.body.dataset.refresh));
