// Charts of many points. The charting library takes a tenth of a millisecond or more for each point
// of a line, so more than MANY become paths: one mark for each curve. Only points that have a mark
// of their own stay rows. Paths are drawn in units of the shown range, and stretched with the axes.
const MANY = 2000, UNITS = 1e5;
const BANDS = 20; // more curves than this have no bands, which would hide them

const mean = (values) => (values.length ? values.reduce((sum, each) => sum + each, 0) / values.length : null);
const isNumber = (value) => value !== null && Number.isFinite(value);

// The point of several runs in one stretch of steps.
function merged(rows) {
  const of = (field) => rows.map((row) => row[field]).filter(isNumber), values = of("value");
  return { curve: rows[0].curve, step: mean(of("step")), x: mean(of("x")), value: mean(values), runs: values.length,
           least: Math.min(...of("least")), greatest: Math.max(...of("greatest")),
           not_finite: rows.reduce((sum, row) => sum + row.not_finite, 0) };
}

// The points of each curve, as the transforms of `spec` make them from its rows.
function pointsOf(spec) {
  const { below, above } = Object.fromEntries(spec.params.map(({ name, value }) => [name, value]));
  const around = spec.transform.find(({ frame }) => frame).frame[1], logY = spec.encoding.y.scale.type === "log";
  const grouped = new Map(); // rows by curve and stretch
  for (const row of spec.data.values) {
    if (!grouped.has(row.curve)) grouped.set(row.curve, new Map());
    const stretches = grouped.get(row.curve);
    if (stretches.has(row.stretch)) stretches.get(row.stretch).push(row);
    else stretches.set(row.stretch, [row]);
  }
  return [...grouped.values()].map((stretches) => {
    const points = [...stretches.values()].map((rows) => {
      const point = rows.length === 1 ? { ...rows[0], runs: Number(isNumber(rows[0].value)) } : merged(rows);
      if (logY && !(point.value > 0)) Object.assign(point, { value: null, runs: 0 });
      if (logY && !(point.least > 0)) point.least = point.value;
      return point;
    }).sort((one, other) => one.step - other.step);
    const most = Math.max(...points.map((point) => point.runs));
    const inside = points.map(({ value }) => (value === null || value > above || value < below ? null : value));
    return points.map((point, i) => {
      const near = around ? inside.slice(Math.max(0, i - around), i + around + 1).filter(isNumber) : [inside[i]];
      return Object.assign(point, { smooth: inside[i] === null ? null : mean(near), most,
        fewer: point.runs < most, before: points[i - 1]?.runs ?? null, after: points[i + 1]?.runs ?? null });
    });
  });
}

// The least and the greatest of numbers.
function range(numbers) {
  let [low, high] = [Infinity, -Infinity];
  for (const each of numbers) if (isNumber(each)) [low, high] = [Math.min(low, each), Math.max(high, each)];
  return [low, high];
}

// The chart of `whole` with paths: its specification, the patch that adds them, and all points.
function withPaths(whole) {
  const curves = pointsOf(whole), points = curves.flat();
  const spec = structuredClone({ ...whole, data: { values: [] } }), { x, y } = spec.encoding;
  const ends = { x: range(points.map((each) => each.x)),
                 y: range(points.flatMap((each) => [each.least, each.greatest])) };
  const { below, above } = Object.fromEntries(spec.params.map(({ name, value }) => [name, value]));
  ends.y = range([Math.max(ends.y[0], below), Math.min(ends.y[1], above)]);
  const unit = ([low, high], { type }) => { // from a value to units
    const to = type === "log" ? Math.log10 : Number, from = to(low), over = UNITS / (to(high) - from || 1);
    return (value) => Math.round(Math.min(Math.max((to(value) - from) * over, -50 * UNITS), 50 * UNITS));
  };
  const [X, Y] = [unit(ends.x, x.scale), unit(ends.y, y.scale)];
  const paths = [];
  for (const own of curves) {
    const { curve } = own[0];
    const add = (path, style) => { if (path) paths.push({ curve, path, dash: [], ...style }); };
    const parts = []; // without breaks
    for (const point of own) {
      if (!parts.length || point.runs !== point.before) parts.push([]);
      parts.at(-1).push(point);
    }
    const joined = (part, field) => { // a line that breaks where there is no value
      let path = "", begins = true;
      for (const point of part) {
        if (isNumber(point[field])) path += `${begins ? "M" : "L"}${X(point.x)},${Y(point[field])}`;
        begins = !isNumber(point[field]);
      }
      return path;
    };
    const band = (part) => {
      const wide = part.filter(({ least, greatest }) => isNumber(least) && isNumber(greatest));
      if (!wide.some(({ least, greatest }) => least < greatest)) return "";
      const edge = (field) => wide.map((point) => `${X(point.x)},${Y(point[field])}`);
      return `M${[...edge("greatest"), ...edge("least").reverse()].join("L")}Z`;
    };
    if (curves.length <= BANDS) add(parts.map(band).join(""), { fill: 0.2, opacity: 0.6, width: 0.8 });
    for (const fewer of [false, true]) {
      const some = parts.filter((part) => part[0].fewer === fewer), dash = fewer ? [4, 3] : [];
      const smoothed = spec.transform.find(({ frame }) => frame).frame[1] > 0;
      if (smoothed) add(some.map((part) => joined(part, "value")).join(""), { fill: 0, opacity: 0.3, width: 1, dash });
      add(some.map((part) => joined(part, "smooth")).join(""), { fill: 0, opacity: 1, width: curves.length > BANDS ? 1 : 1.8, dash });
    }
  }
  spec.data.values = points.filter(({ runs, before, after, not_finite, least, greatest }) =>
    not_finite > 0 || greatest > above || least < below || (runs !== before && runs !== after));
  spec.transform = [];
  x.scale = { ...x.scale, domain: ends.x };
  y.scale = { ...y.scale, domain: ends.y };
  spec.layer = spec.layer.filter(({ mark }) => !["area", "line"].includes(mark.type));
  for (const layer of spec.layer.slice(-2)) layer.data = { name: "nearest", values: [] };
  const stretched = (name) => {
    const [low, high] = ends[name].map((each) => `scale('${name}', ${each})`);
    return { [name]: { signal: low }, [`scale${name.toUpperCase()}`]: { signal: `(${high} - ${low}) / ${UNITS}` } };
  };
  const colour = { scale: "color", field: "curve" };
  const patch = (made) => {
    made.data.push({ name: "paths", values: paths });
    made.marks.unshift({ type: "path", clip: true, interactive: false, from: { data: "paths" },
      encode: { update: { path: { field: "path" }, stroke: colour, fill: colour, fillOpacity: { field: "fill" },
        strokeOpacity: { field: "opacity" }, strokeWidth: { field: "width" }, strokeDash: { field: "dash" },
        ...stretched("x"), ...stretched("y") } } });
    return made;
  };
  return { spec, patch, points };
}

// Keeps the point that is nearest to the pointer as the one row that the pointer can reach.
function followPointer(view, points) {
  let nearest = null;
  view.container().addEventListener("pointermove", ({ clientX, clientY }) => {
    const box = view.container().querySelector("canvas").getBoundingClientRect();
    const [left, top] = view.origin(), padding = view.padding(), [x, y] = ["x", "y"].map((name) => view.scale(name));
    const [atX, atY] = [clientX - box.left - left - padding.left, clientY - box.top - top - padding.top];
    let least = Infinity, found = null;
    for (const point of points) {
      const distance = isNumber(point.smooth) ? (x(point.x) - atX) ** 2 + (y(point.smooth) - atY) ** 2 : Infinity;
      if (distance < least) [least, found] = [distance, point];
    }
    if (found !== nearest) view.data("nearest", [{ ...(nearest = found) }]).run();
  }, { capture: true });
}
