// The table of runs: a click on a header sorts it, a text filters it, and groups of seeds open.
const leftOut = new Set(); // the runs that the filter leaves out of the page, by number
const opened = new Set(); // groups, by name
let sorting = null; // the key of a column, and 1 or -1

// Splits a filter like "adam seed=1": a run must have the text adam and the setting seed=1.
function conditions(heads) {
  const isKey = (head, name) => `.${head.dataset.key}`.toLowerCase().endsWith(`.${name}`);
  return control("filter").value.toLowerCase().split(/[\s,]+/).filter(Boolean).map((term) => {
    const [name, ...rest] = term.split("="), value = rest.join("=");
    const columns = rest.length ? heads.flatMap((head, i) => (isKey(head, name) ? [i] : [])) : [];
    const equals = (cell) => cell.textContent.toLowerCase().replace(/^'(.*)'$/, "$1") === value ||
      (value !== "" && Number(cell.dataset.value) === Number(value));
    if (columns.length) return (row) => columns.some((i) => equals(row.cells[i]));
    return (row) => row.textContent.toLowerCase().includes(term);
  });
}

// Compares rows by a column: numbers, then texts, then nothing.
function compared(column, direction) {
  const key = ({ cells: { [column]: { dataset, textContent } } }) => {
    const value = Number(dataset.value ?? NaN);
    return Number.isNaN(value) ? [textContent === "" || "value" in dataset ? 2 : 1, textContent] : [0, value];
  };
  return (one, other) => {
    const [[kind, x], [otherKind, y]] = [key(one), key(other)];
    if (kind !== otherKind) return kind - otherKind;
    return direction * (kind ? x.localeCompare(y, "en", { numeric: true }) : x - y);
  };
}

// Sorts and filters the table, opens its groups, and shows the colours of the curves.
function arrange() {
  const table = document.querySelector("#runs table");
  control("filters").hidden = !table;
  leftOut.clear();
  if (!table) return;
  const heads = [...table.tHead.rows[0].cells], wanted = conditions(heads);
  const column = heads.findIndex((head) => head.dataset.key === sorting?.[0]);
  const order = column < 0 ? null : compared(column, sorting[1]);
  const shades = colours(), names = curves();
  heads.forEach((head, i) => {
    head.ariaSort = i === column ? (sorting[1] > 0 ? "ascending" : "descending") : null;
  });
  const bodies = [...table.tBodies].map((body) => {
    const group = body.rows[0].dataset.run === undefined ? body.rows[0] : null;
    const rows = [...body.rows].filter((row) => row !== group);
    const found = rows.filter((row) => wanted.every((each) => each(row)));
    const name = data.runs[rows[0].dataset.run]?.group, isWhole = found.length === rows.length;
    for (const row of rows) {
      const run = Number(row.dataset.run), isFound = found.includes(row);
      if (!isFound) leftOut.add(run);
      row.hidden = !isFound || (group !== null && isWhole && !opened.has(name));
      row.querySelector("i").style.background = shades[names.indexOf(curveOf(data.runs[run]))];
    }
    if (group) {
      group.hidden = !isWhole; // the means are of all its runs
      group.querySelector("button").ariaExpanded = String(opened.has(name));
      group.querySelector("i").style.background = bySeed() ? rows[0].querySelector("i").style.background : "none";
    }
    if (order) body.append(...(group ? [group] : []), ...rows.sort(order));
    return body;
  });
  const first = ({ rows }) => [...rows].find((row) => !row.hidden) ?? rows[0];
  if (order) table.append(...bodies.sort((one, other) => order(first(one), first(other))));
  const count = data.runs.length - leftOut.size;
  control("filtered").textContent = wanted.length ? `${count} of ${data.runs.length} runs` : "";
}

document.addEventListener("click", ({ target }) => {
  const cell = target.closest("#runs :is(th, td):has(> button)");
  if (!cell) return;
  const { key } = cell.dataset;
  if (key) sorting = [key, sorting?.[0] === key ? -sorting[1] : 1];
  else {
    const { group } = data.runs[cell.closest("tbody").rows[1].dataset.run];
    if (!opened.delete(group)) opened.add(group);
  }
  arrange();
});
