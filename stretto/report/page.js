"use strict";
// Draws the charts of a report anew, as its reader likes: over steps, tokens or time, smoothed, on a log scale, with values
// under the pointer. Everything it shows comes from the page itself, and enters it as text, never as markup.

const data = JSON.parse(document.getElementById("data").textContent); // charts, and where runs were resumed
const form = document.getElementById("controls");
const figures = [...document.querySelectorAll("figure")];
const [LEFT, RIGHT, TOP, BOTTOM, FEW, COLOURS] = [52, 14, 8, 24, 20, 8]; // as in chart.py
const VALUE = 3; // behind step, tokens and seconds in a point
const AXES = ["step", "tokens", "time"];
const known = (value) => Number.isFinite(value);

const settings = () => ({
  axis: Number(form.elements.axis.value),
  weight: Number(form.elements.smoothing.value) / 100,
  log: form.elements.log.checked,
  hidden: new Set([...document.querySelectorAll(".legend input:not(:checked)")].map((box) => Number(box.value))),
});

// ---- numbers and axes

function short(value) {
  for (const [size, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size && Math.abs(value) < 1e15) return Number((value / size).toPrecision(4)) + unit;
  }
  const size = Math.abs(value);
  return size === 0 || (size >= 0.01 && size < 1e3) ? String(Number(value.toPrecision(4))) : String(Number(value.toPrecision(3)).toExponential());
}

function clock(seconds) {
  const parts = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, Math.round(seconds) % 60];
  return (parts[0] ? parts : parts.slice(1)).map((part, i) => (i ? String(part).padStart(2, "0") : part)).join(":");
}

const whole = (value) => Math.round(value).toLocaleString("en");
const exact = (value) => (Math.abs(value) >= 1e3 ? whole(value) : Math.abs(value) >= 0.01 ? String(Number(value.toPrecision(5))) : short(value));
const describe = (value, axis) => [`step ${whole(value)}`, `${short(value)} tokens`, clock(value)][axis];

function ticks(low, high, most, steps = [1, 2, 5, 10]) {
  const size = 10 ** Math.floor(Math.log10((high - low) / most));
  const step = steps.length > 4 ? steps.find((s) => (high - low) / s <= most) : size * steps.find((s) => (high - low) / (size * s) <= most);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, k) => (first + k) * step);
}

function timeTicks(end, most) {
  const round = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
  return end / 86400 > most ? ticks(0, end / 86400, most).map((day) => day * 86400) : ticks(0, end, most, round);
}

function logTicks(low, high) {
  const powers = ticks(Math.floor(Math.log10(low)), Math.ceil(Math.log10(high)), 6).filter((p) => p % 1 === 0);
  const round = powers.flatMap((power) => [1, 2, 5].map((k) => k * 10 ** power)).filter((v) => v >= low && v <= high);
  const tens = round.filter((v) => String(v.toExponential())[0] === "1");
  return round.length < 3 ? ticks(low, high, 5) : round.length > 7 ? tens : round;
}

function range(values, zero, log) {
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (log) return low < high ? [low * (low / high) ** 0.04, high * (high / low) ** 0.04] : [low / 2, high * 2];
  if (zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
  const air = 0.06 * (high - low) || Math.abs(high) || 1;
  return [zero && low === 0 ? low : low - air, high + air];
}

// ---- one chart

function element(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

function smooth(points, weight) { // an exponential mean that begins without a bias, so that the first value is itself
  let [sum, norm] = [0, 0];
  return points.map((point) => {
    if (!known(point[VALUE])) return point;
    [sum, norm] = [weight * sum + (1 - weight) * point[VALUE], weight * norm + 1 - weight];
    return [...point.slice(0, VALUE), sum / norm];
  });
}

function path(places) {
  let pen = "M";
  return places.map(([x, y]) => {
    const command = known(y) ? `${pen}${x.toFixed(1)} ${y.toFixed(1)}` : "";
    pen = known(y) ? "L" : "M";
    return command;
  }).join("");
}

function draw(chart, figure, { axis, weight, log, hidden }) {
  const width = figure.clientWidth, height = Math.max(200, Math.round(0.36 * width));
  const shown = chart.series.filter((one) => !hidden.has(one.run)).map((one) => {
    const points = one.points.filter((point) => known(point[axis]));
    return { ...one, raw: points, points: weight && chart.noisy && !one.dots ? smooth(points, weight) : points };
  });
  const values = shown.flatMap((one) => one.raw.map((point) => point[VALUE])).filter(known);
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  figure.querySelector("svg").replaceWith(svg);
  if (!values.length) {
    svg.append(element("text", { class: "none", x: width / 2, y: height / 2 }, "no numbers yet"));
    return null;
  }
  const useLog = log && !chart.zero && values.every((value) => value > 0);
  const [low, high] = range(values, chart.zero, useLog);
  const last = Math.max(...shown.flatMap((one) => one.raw.map((point) => point[axis])));
  const end = (last > 0 ? last : 1) * 1.01;
  const scale = useLog ? Math.log : Number;
  const x = (value) => LEFT + ((width - LEFT - RIGHT) * value) / end;
  const y = (value) => height - BOTTOM - ((height - TOP - BOTTOM) * (scale(value) - scale(low))) / (scale(high) - scale(low));
  for (const tick of useLog ? logTicks(low, high) : ticks(low, high, 5)) {
    svg.append(element("path", { class: "rule", d: `M${LEFT} ${y(tick)}H${width - RIGHT}` }));
    svg.append(element("text", { class: "y", x: LEFT - 8, y: y(tick) + 4 }, short(tick)));
  }
  const most = Math.max(2, Math.min(8, Math.floor(width / 70)));
  for (const tick of axis === 2 ? timeTicks(end, most) : ticks(0, end, most).filter((t) => t % 1 === 0)) {
    if (x(tick) < width - 70) svg.append(element("text", { x: x(tick), y: height - 6 }, axis === 2 ? clock(tick) : short(tick)));
  }
  svg.append(element("text", { class: "x", x: width - RIGHT, y: height - 6 }, AXES[axis]));
  for (const [run, kind, ...place] of data.resumed) {
    if (!hidden.has(run)) svg.append(element("path", { class: kind, d: `M${x(place[axis])} ${TOP}V${height - BOTTOM}` }));
  }
  const line = (one, points, more) => svg.append(element("path", {
    class: `line s${one.colour} ${more} ${one.run < COLOURS ? "" : "dash"}`, d: path(points.map((point) => [x(point[axis]), known(point[VALUE]) ? y(point[VALUE]) : NaN])),
  }));
  for (const one of shown) {
    if (one.raw !== one.points) line(one, one.raw, "faint");
    line(one, one.points, one.dots ? "thin" : "");
    if (!one.dots && one.points.length >= FEW) continue;
    for (const point of one.points.filter((p) => known(p[VALUE]))) {
      svg.append(element("circle", { class: `s${one.colour}`, cx: x(point[axis]), cy: y(point[VALUE]), r: 3 }));
    }
  }
  const value = (pixel) => Math.min(Math.max((pixel - LEFT) / (width - LEFT - RIGHT), 0), 1) * end;
  return { svg, shown, x, y, value, width, height, axis };
}

// ---- the values under the pointer

function nearest(points, axis, value) {
  const distance = (point) => (known(point[VALUE]) ? Math.abs(point[axis] - value) : Infinity);
  return points.reduce((best, point) => (distance(point) < distance(best) ? point : best), points[0]);
}

function point(view, value) { // marks what is nearest to a place on the axis; returns these points
  view.svg.querySelectorAll(".guide").forEach((mark) => mark.remove());
  if (value === null) return [];
  const found = view.shown.filter((one) => one.points.length).map((one) => ({ ...one, point: nearest(one.points, view.axis, value) }));
  const marked = found.filter((one) => known(one.point[VALUE]));
  if (marked.length) {
    const at = view.x(marked[0].point[view.axis]);
    view.svg.append(element("path", { class: "guide", d: `M${at} ${TOP}V${view.height - BOTTOM}` }));
  }
  for (const { point, colour } of marked) {
    view.svg.append(element("circle", { class: `guide s${colour}`, cx: view.x(point[view.axis]), cy: view.y(point[VALUE]), r: 4 }));
  }
  return marked;
}

function tell(figure, view, marked) {
  figure.querySelector(".tip")?.remove();
  if (!marked.length) return;
  const tip = document.createElement("div");
  tip.className = "tip";
  const head = document.createElement("div");
  head.textContent = describe(marked[0].point[view.axis], view.axis);
  tip.append(head, ...marked.map(({ name, colour, point }) => {
    const row = document.createElement("div"), text = document.createElement("span");
    row.className = `s${colour}`;
    text.textContent = `${name} ${exact(point[VALUE])}`;
    row.append(text);
    return row;
  }));
  figure.append(tip);
  const at = view.x(marked[0].point[view.axis]);
  const left = at + 14 + tip.offsetWidth > view.width ? at - 14 - tip.offsetWidth : at + 14;
  tip.style.left = `${Math.max(0, left)}px`;
}

// ---- the page

let views = [];

function look(value, here = -1) { // at one place of all charts; the values are told beside the chart `here`
  views.forEach((view, i) => {
    const marked = view ? point(view, value) : [];
    tell(figures[i], view, i === here ? marked : []);
  });
}

function redraw() {
  const chosen = settings();
  form.querySelector("output").textContent = chosen.weight.toFixed(2);
  look(null);
  views = data.charts.map((chart, i) => draw(chart, figures[i], chosen));
}

function walk(view, here, key) { // with the arrow keys, from point to point of the first curve
  const places = view.shown[0].points.map((point) => point[view.axis]);
  const now = view.place ?? (key === "ArrowRight" ? -1 : places.length);
  view.place = Math.min(Math.max(now + (key === "ArrowRight" ? 1 : -1), 0), places.length - 1);
  look(places[view.place], here);
}

figures.forEach((figure, i) => {
  const follow = (event) => views[i] && look(views[i].value(event.clientX - figure.getBoundingClientRect().left), i);
  figure.addEventListener("pointermove", follow);
  figure.addEventListener("pointerdown", follow);
  figure.addEventListener("pointerleave", () => look(null));
  figure.addEventListener("blur", () => look(null));
  figure.addEventListener("keydown", (event) => {
    if (!views[i]?.shown.length || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    event.preventDefault();
    walk(views[i], i, event.key);
  });
});

for (const box of form.elements.axis) { // an old run may not have counted its tokens, or noted the time
  const axis = Number(box.value);
  box.disabled = axis > 0 && !data.charts.some((chart) => chart.series.some((one) => one.points.some((p) => p[axis] > 0)));
}
form.hidden = false;
form.addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("input", redraw);
window.addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => (part.open = true)));
new ResizeObserver(redraw).observe(figures[0]);
redraw();
