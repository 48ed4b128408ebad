// Curves of runs with uPlot: a panel for each metric, one axis of steps or time, a readout table below with best and last values.
import uPlot from "uplot";
import { isFinite, metricText } from "./numbers.js";
import { translated } from "./translations.js";

const LETTERS = "ABCD";
const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3]];
const REFRESH_MS = 10000;

function colour(name) { // light-dark() is resolved only on a real property
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

function element(tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}

function readout(runs, curves, alone) {
  const sheet = element("table", "fw-table fw-table--tight fw-mt-2");
  const head = sheet.createTHead().insertRow();
  const at = element("th", "fw-num", translated("at the cursor"));
  head.append(element("th", "", translated("Run")), at, element("th", "fw-num", translated("lowest")), element("th", "fw-num", translated("highest")), element("th", "fw-num", translated("last")));
  const cells = runs.map((run, i) => {
    const line = sheet.insertRow();
    line.dataset.c = String(i + 1);
    const name = line.insertCell();
    if (!alone) name.append(element("span", "fw-ser", LETTERS[i]), " ");
    name.append(run.name || run.id);
    const values = curves[run.id]?.values ?? [];
    const finite = values.filter(isFinite);
    const low = finite.length ? Math.min(...finite) : null;
    const high = finite.length ? Math.max(...finite) : null;
    return [null, low, high, values.at(-1)].map((value) => {
      const cell = line.insertCell();
      cell.className = "fw-num";
      cell.textContent = value === null && cell.cellIndex === 1 ? "" : metricText(value);
      return cell;
    })[0];
  });
  return { sheet, cells, at };
}

const AXES = { // positions of a curve of a run, and how the readout names one
  steps: { places: (run, curve) => curve.steps, at: (step) => translated("at step {step}", { step }) },
  hours: { places: (run, curve) => curve.hours, at: (hours) => translated("after {hours} h", { hours }) },
  gpu_hours: { places: (run, curve) => curve.hours.map((hours) => hours * run.gpus), at: (hours) => translated("after {hours} GPU-h", { hours }) },
};

function points(run, curve, axis) { // by place; of equal places the last one
  const known = new Map();
  if (curve) AXES[axis].places(run, curve).forEach((place, i) => known.set(place, curve.values[i]));
  return new Map([...known].sort((a, b) => a[0] - b[0]));
}

const LARGEST_DRAWN = 1e30; // the steps of uPlot's axes are from 1e-32 to 1e32
const SMALLEST_DRAWN = 1e-30;

function unitOf(tables) { // what finite values are divided by for the plot
  const size = tables.flatMap((places) => [...places.values()].filter(isFinite)).reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  return size > LARGEST_DRAWN || (size && size < SMALLEST_DRAWN) ? size : 1;
}

const axisWidth = (u, labels) => Math.max(52, 12 + 6.5 * Math.max(0, ...(labels ?? []).map((label) => label.length)));

const MARK_PX = 4;
const MAX_NAMED = 5;

function drawMarks(u, places, ink) { // of values that are not finite: above the plot for infinity, below for the others
  const { ctx } = u;
  const size = MARK_PX * devicePixelRatio;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = ink;
  for (const [place, value] of places) {
    if (isFinite(value) || place < u.scales.x.min || place > u.scales.x.max) continue;
    const x = u.valToPos(place, "x", true);
    const y = value === "Infinity" ? u.bbox.top + size : u.bbox.top + u.bbox.height - size;
    const side = value === "Infinity" ? 1 : -1; // the triangle points outwards
    ctx.beginPath();
    if (value === "NaN") {
      for (const slope of [1, -1]) { ctx.moveTo(x - size, y - slope * size); ctx.lineTo(x + size, y + slope * size); }
      ctx.stroke();
    } else {
      ctx.moveTo(x - size, y + side * size);
      ctx.lineTo(x + size, y + side * size);
      ctx.lineTo(x, y - side * size);
      ctx.fill();
    }
  }
  ctx.restore();
}

function notFinite(runs, tables, axis, alone) { // the same in words, or null
  const found = runs.flatMap((run, i) => [...tables[i]].filter(([, value]) => !isFinite(value)).map(([place, value]) => `${alone ? "" : `${LETTERS[i]} `}${metricText(value)} ${AXES[axis].at(metricText(place))}`));
  if (!found.length) return null;
  const list = found.slice(0, MAX_NAMED).join(", ");
  const more = found.length > MAX_NAMED ? `, ${translated("and {count} more", { count: found.length - MAX_NAMED })}` : "";
  return element("p", "fw-cap fw-mt-2", translated("Not finite, so outside of the scale: {list}", { list: list + more }));
}

function draw(panel, name, runs, curves, axis) {
  const alone = runs.length === 1;
  const host = panel.querySelector(".fw-plot");
  const body = panel.querySelector(".fw-panel__body");
  panel.plot?.destroy();
  host.replaceChildren();
  for (const old of body.querySelectorAll("table, p")) old.remove();
  const { sheet, cells, at } = readout(runs, curves, alone);
  const tables = runs.map((run) => points(run, curves[run.id], axis));
  const note = notFinite(runs, tables, axis, alone);
  body.append(sheet, ...(note ? [note] : []));
  const unit = unitOf(tables);
  const data = uPlot.join(tables.map((places) => [[...places.keys()], [...places.values()].map((value) => (isFinite(value) ? value / unit : null))]));
  const inks = runs.map((run, i) => colour(alone ? "--fw-run" : `--fw-c${i + 1}`));
  const ink = colour("--fw-ink-3");
  const font = "11px system-ui, sans-serif";
  const follow = (u) => {
    const index = u.cursor.idx;
    at.textContent = index === null || index === undefined ? translated("at the cursor") : AXES[axis].at(metricText(data[0][index]));
    cells.forEach((cell, i) => { cell.textContent = index === null || index === undefined ? "" : metricText(tables[i].get(data[0][index])); });
  };
  panel.plot = new uPlot({
    width: host.clientWidth,
    height: host.clientHeight,
    padding: [8, 16, 0, MARK_PX],
    legend: { show: false },
    cursor: { drag: { x: true, y: false }, points: { size: 5 } },
    scales: { x: { time: false } },
    hooks: { setCursor: [follow], draw: [(u) => tables.forEach((places, i) => drawMarks(u, places, inks[i]))] },
    axes: [
      { stroke: ink, font, grid: { show: false }, ticks: { show: false }, size: 22, gap: 4, space: 70, values: (u, steps) => steps.map(metricText) },
      { stroke: ink, font, grid: { stroke: colour("--fw-line"), width: 1 }, ticks: { show: false }, size: axisWidth, gap: 6, space: 50, values: (u, values) => values.map((value) => (isFinite(value * unit) ? metricText(value * unit) : "")) },
    ],
    series: [{}, ...runs.map((run, i) => ({
      label: run.name,
      stroke: inks[i],
      dash: alone ? [] : DASHES[i],
      width: 1.75,
      spanGaps: true,
      points: { show: (u) => u.data[0].length === 1, size: 6 },
    }))],
  }, data, host);
  host.setAttribute("aria-label", translated("{name} by step of {runs}", { name, runs: runs.map((run) => run.name).join(", ") }));
}

function panelFor(box, name) {
  const panel = element("section", "fw-panel");
  const head = element("header", "fw-panel__head");
  head.append(element("h3", "", name));
  const body = element("div", "fw-panel__body");
  const host = element("div", "fw-plot");
  host.setAttribute("role", "img");
  body.append(host);
  panel.append(head, body);
  box.append(panel);
  return panel;
}

function render(box) {
  const { runs, metrics } = box.fairwayData;
  for (const [name, curves] of Object.entries(metrics)) draw((box.panels[name] ??= panelFor(box, name)), name, runs, curves, box.axis);
}

async function fill(box) {
  const answer = await fetch(box.dataset.runCharts, { headers: { Accept: "application/json" } });
  const note = box.querySelector("p");
  if (!answer.ok) { if (note) note.textContent = translated("The curves cannot be read now. Reload the page to try again."); return true; }
  box.fairwayData = await answer.json();
  const { metrics, omitted } = box.fairwayData;
  const none = Object.keys(metrics).length === 0;
  note.hidden = !none && omitted === 0;
  note.textContent = none ? translated("No metrics yet") : translated("{omitted} more metrics are in the table of the run.", { omitted });
  render(box);
  return box.fairwayData.runs.some((run) => run.running);
}

export function drawRunCharts(root) {
  for (const box of root.querySelectorAll("[data-run-charts]")) {
    if (box.dataset.started) continue;
    box.dataset.started = "1";
    box.panels = {};
    box.axis = "steps";
    fill(box);
    const choice = document.querySelector("[data-run-axis]");
    for (const button of choice?.querySelectorAll("button") ?? []) {
      button.addEventListener("click", () => {
        box.axis = button.dataset.axis;
        for (const other of choice.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button));
        if (box.fairwayData) render(box);
      });
    }
    const again = () => { if (box.fairwayData) render(box); };
    let width = box.clientWidth;
    let timer;
    new ResizeObserver(() => { // a panel that grows changes the height only
      if (box.clientWidth === width) return;
      width = box.clientWidth;
      clearTimeout(timer);
      timer = setTimeout(again, 120);
    }).observe(box);
    addEventListener("fairway-colours", again);
    if (!box.hasAttribute("data-growing")) continue;
    const refresh = setInterval(async () => {
      if (!box.isConnected) clearInterval(refresh);
      else if (document.visibilityState === "visible" && !(await fill(box))) clearInterval(refresh);
    }, REFRESH_MS);
  }
}
