// Charts with uPlot: grid lines only across, three labels, the newest value in the panel head, a table behind.
import uPlot from "uplot";
import { subscribe } from "./live.js";
import { drawGpus } from "./gpu_squares.js";
import { clock } from "./relative_times.js";
import { translated } from "./translations.js";

const charts = new Map(); // element -> uPlot

function colour(name) { // light-dark() is resolved only on a real property
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

const minute = (seconds) => clock(seconds * 1000);
const SHORT_S = 300; // below this the axis counts seconds
const SECOND_STEPS_S = [1, 5, 10, 15, 30, 60];
const TIME_STEPS_S = [60, 300, 900, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800];
const LINE_COLOURS = ["--fw-c1", "--fw-c2", "--fw-c3", "--fw-c4"];
const MAX_KEYS = 16; // beyond it the readout names only the mean

function spread(lines) { // the middle line of many, so that one look is enough
  const names = Object.keys(lines);
  return { names, many: names.length > 1 };
}

function span(u, from, to) { // of a lone moment uPlot would make the first of a whole day
  const [only, ...more] = u.data[0];
  return only !== undefined && more.length === 0 ? [only - 60, only + 60] : [from, to];
}

function options(host, names, unit, top, said = (value) => `${rounded(value)}\u00a0${unit}`) {
  const line = colour("--fw-line");
  const ink = colour("--fw-ink-3");
  const main = colour("--fw-run");
  const font = "11px system-ui, sans-serif";
  return {
    width: host.clientWidth,
    height: host.clientHeight,
    padding: [8, 28, 0, 0],
    legend: { show: false },
    cursor: { drag: { x: true, y: false }, points: { size: 5 } },
    hooks: {
      setCursor: [(u) => readout(host, u, names, said)],
      setSelect: [(u) => { host.fairwayZoomed = u.select.width > 0; }], // live samples would end the zoom
      ready: [(u) => { u.over.addEventListener("dblclick", () => { host.fairwayZoomed = false; }); readout(host, u, names, said); }],
    },
    scales: { x: { time: true, range: span }, y: { range: (u, low, high) => [0, top ?? Math.max(1, high * 1.1)] } },
    axes: [
      { stroke: ink, font, grid: { show: false }, ticks: { show: false }, size: 22, gap: 4, incrs: (u, axis, low, high) => (high - low < SHORT_S ? SECOND_STEPS_S : TIME_STEPS_S), values: (u, at) => at.map((s) => clock(s * 1000, u.scales.x.max - u.scales.x.min < SHORT_S)), space: 70 },
      { stroke: ink, font, grid: { stroke: line, width: 1 }, ticks: { show: false }, size: 44, gap: 6, space: 28, values: (u, at) => at.map((v) => `${v}${unit === "%" ? "%" : ""}`) },
    ],
    series: [{}, ...names.map((name, i) => ({
      label: name,
      stroke: names.length > 1 ? lineColour(i) : main,
      width: names.length > 1 ? 1 : 1.75,
      fill: names.length > 1 ? undefined : colour("--fw-run-wash"),
      spanGaps: false,
      points: { show: (u) => u.data[0].length === 1, size: 6 }, // a lone minute is no line
    }))],
  };
}

function lineColour(i) { return colour(LINE_COLOURS[i % LINE_COLOURS.length]); }

function readout(host, u, names, said) { // below the plot: a key and the value at the pointer, else the newest, of each line
  const body = host.parentElement;
  let keys = body.querySelector(".fw-keys");
  if (!keys) { keys = document.createElement("ul"); keys.className = "fw-keys fw-mt-2"; body.append(keys); }
  const at = u.cursor.idx ?? null;
  const values = names.map((_, i) => (at === null ? last(u.data[i + 1]) : u.data[i + 1][at]));
  const time = at === null ? translated("newest") : clock(u.data[0][at] * 1000, u.scales.x.max - u.scales.x.min < SHORT_S);
  const known = values.filter((value) => value !== null && value !== undefined);
  const rows = names.length > MAX_KEYS ? [[translated("mean of {count}", { count: names.length }), known.length ? known.reduce((a, b) => a + b, 0) / known.length : null]] : names.map((name, i) => [name, values[i], i]);
  keys.replaceChildren(...[["", time], ...rows].map(([name, value, i]) => {
    const item = document.createElement("li");
    if (i !== undefined) { const key = document.createElement("i"); key.className = "fw-key fw-key--line"; key.style.background = names.length > 1 ? lineColour(i) : colour("--fw-run"); item.append(key); }
    item.append(name === "" ? value : `${name} ${value === null || value === undefined ? "unknown" : said(value)}`);
    return item;
  }));
}

function last(values) { for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null) return values[i]; return null; }
function rounded(value) { return value >= 100 ? Math.round(value).toLocaleString("en") : Number(value.toPrecision(value < 0.1 ? 1 : 2)).toString(); }

function drawOne(host, data) {
  const kind = host.dataset.plot;
  if (host.fairwayZoomed && charts.has(host)) return;
  const scale = Number(host.dataset.scale ?? 1);
  const { unit } = host.dataset;
  const lines = data.lines[kind] ?? {};
  const { names } = spread(lines);
  charts.get(host)?.destroy();
  charts.delete(host);
  host.replaceChildren();
  const now = host.closest(".fw-panel")?.querySelector("[data-now]");
  if (data.at.length === 0 || names.length === 0) {
    host.classList.add("fw-plot--empty");
    host.textContent = translated("No measurements yet");
    if (now) now.textContent = "";
    return;
  }
  host.classList.remove("fw-plot--empty");
  const values = names.map((name) => lines[name].map((v) => (v === null ? null : v / scale)));
  const limit = data.limits?.[kind];
  const top = host.dataset.top ? Number(host.dataset.top) : limit ? (limit / scale) * 1.02 : undefined;
  charts.set(host, new uPlot(options(host, names, unit, top), [data.at, ...values], host));
  const ends = values.map(last).filter((v) => v !== null);
  const mean = ends.length ? ends.reduce((a, b) => a + b, 0) / ends.length : null;
  const of = limit ? ` ${translated("of {limit}", { limit: rounded(limit / scale) })}` : "";
  const words = mean === null ? translated("unknown") : `${names.length > 1 ? `${translated("mean")} ` : ""}${rounded(mean)}${of}\u00a0${unit}`;
  if (now) now.textContent = words;
  host.setAttribute("aria-label", `${host.closest(".fw-panel")?.querySelector("h2")?.textContent}: ${words} at ${minute(data.at.at(-1))}`);
}

function table(box, data) {
  const kinds = [["gpu", translated("GPU use, %"), 1], ["gpu_memory", translated("GPU memory, GiB"), 1024], ["power", translated("Power, W"), 1], ["cpu", translated("CPU, cores"), 100], ["memory", translated("Memory, GiB"), 1024]];
  const sheet = document.createElement("table");
  sheet.className = "fw-table fw-table--tight";
  const head = sheet.createTHead().insertRow();
  const columns = kinds.flatMap(([kind, title, scale]) => Object.entries(data.lines[kind] ?? {}).map(([name, values]) => [`${title}, ${name}`, values, scale]));
  const bySecond = data.at.length > 1 && data.at[1] - data.at[0] < 60;
  for (const title of [bySecond ? translated("Time") : translated("Minute"), ...columns.map(([name]) => name)]) { const cell = document.createElement("th"); cell.scope = "col"; cell.textContent = title; head.append(cell); }
  const body = sheet.createTBody();
  for (let i = data.at.length - 1; i >= 0; i--) {
    const line = body.insertRow();
    line.insertCell().textContent = clock(data.at[i] * 1000, bySecond);
    for (const [, values, scale] of columns) { const cell = line.insertCell(); cell.className = "fw-num"; cell.textContent = values[i] === null ? translated("unknown") : rounded(values[i] / scale); }
  }
  box.replaceChildren(sheet);
}

function appendSample(box, sample) { // a point a second between the minutes
  const data = box.fairwayData;
  if (!data || sample.kind !== "sample" || sample.at_s <= (data.at.at(-1) ?? 0)) return;
  const now = {};
  const put = (kind, name, value) => { (now[kind] ??= {})[name] = value ?? null; };
  for (const gpu of sample.gpus ?? []) put("gpu", data.gpus[gpu.uuid] ?? gpu.uuid, gpu.utilisation_percent); // a node
  for (const task of sample.tasks ?? []) {
    const label = data.labels?.[task.rank] ?? `rank ${task.rank}`;
    put("cpu", label, task.cpu_percent);
    put("memory", label, task.memory_mib);
    for (const gpu of task.gpus ?? []) {
      const name = data.gpus[gpu.uuid] ?? gpu.uuid;
      put("gpu", name, gpu.utilisation_percent);
      put("gpu_memory", name, gpu.memory_used_mib);
      put("power", name, gpu.power_watts);
    }
  }
  data.at.push(sample.at_s);
  for (const kind of Object.keys(data.lines)) {
    const lines = data.lines[kind];
    for (const name of new Set([...Object.keys(lines), ...Object.keys(now[kind] ?? {})])) {
      lines[name] ??= new Array(data.at.length - 1).fill(null);
      lines[name].push(now[kind]?.[name] ?? null);
    }
  }
  drawGpus(sample.gpus ?? (sample.tasks ?? []).flatMap((task) => task.gpus ?? []));
  for (const host of box.querySelectorAll("[data-plot]")) drawOne(host, data);
}

async function fill(box) {
  const answer = await fetch(box.dataset.charts, { headers: { Accept: "application/json" } });
  if (!answer.ok) return;
  const data = await answer.json();
  box.fairwayData = data;
  const blank = data.at.length === 0 && !box.hasAttribute("data-growing");
  box.hidden = blank;
  const word = box.parentElement.querySelector("[data-no-charts]");
  if (word) word.hidden = !blank;
  if (blank) return;
  for (const host of box.querySelectorAll("[data-plot]")) drawOne(host, data);
  const sheet = document.querySelector("[data-plot-table]");
  if (sheet) table(sheet, data);
}

function drawForecast(host) { // start times over the time of the forecast, with the band from p10 to p90
  const data = JSON.parse(host.dataset.forecast);
  const names = [translated("earliest"), translated("latest"), translated("median")]; // the band would cover a median before it
  const made = options(host, names, "", undefined, minute);
  made.scales.y = { range: (u, low, high) => [low - 60, high + 60] };
  Object.assign(made.axes[1], { size: 64, incrs: TIME_STEPS_S, values: (u, at) => at.map(minute) });
  made.bands = [{ series: [2, 1], fill: colour("--fw-run-wash") }];
  const stepped = uPlot.paths.stepped({ align: 1 }); // a forecast holds until the next one
  for (const series of made.series.slice(1)) series.paths = stepped;
  made.series[3].width = 2;
  const until = (values) => (data.until ? [...values, values.at(-1)] : values);
  charts.get(host)?.destroy();
  host.replaceChildren();
  charts.set(host, new uPlot(made, [data.until ? [...data.at, data.until] : data.at, until(data.p10), until(data.p90), until(data.p50)], host));
}

export function drawCharts(root) {
  for (const host of root.querySelectorAll("[data-forecast]")) {
    if (host.dataset.started) continue;
    host.dataset.started = "1";
    const again = () => drawForecast(host);
    new ResizeObserver(() => { clearTimeout(host.fairwayTimer); host.fairwayTimer = setTimeout(again, 120); }).observe(host);
    addEventListener("fairway-colours", again);
  }
  for (const box of root.querySelectorAll("[data-charts]")) {
    if (box.dataset.started) continue;
    box.dataset.started = "1";
    fill(box);
    const again = () => { for (const host of box.querySelectorAll("[data-plot]")) if (box.fairwayData) drawOne(host, box.fairwayData); };
    new ResizeObserver(() => { clearTimeout(box.fairwayTimer); box.fairwayTimer = setTimeout(again, 120); }).observe(box);
    addEventListener("fairway-colours", again);
    if (box.hasAttribute("data-growing")) {
      subscribe(box.dataset.topic, (sample) => { if (document.visibilityState === "visible") appendSample(box, sample); });
      const timer = setInterval(() => { if (!box.isConnected) clearInterval(timer); else if (document.visibilityState === "visible") fill(box); }, 60000);
    }
  }
}
