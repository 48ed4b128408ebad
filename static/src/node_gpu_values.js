// Updates the values of a node's GPUs in its table with each live sample; a new fragment is filled with the last one.
import { subscribe } from "./live.js";

const SHOWN = {
  utilisation: (gpu) => [gpu.utilisation_percent, "%"],
  memory: (gpu) => [gpu.memory_used_mib === null ? null : gpu.memory_used_mib / 1024, "GiB"],
  power: (gpu) => [gpu.power_watts, "W"],
  heat: (gpu) => [gpu.temperature_c, "°C"],
};
let last = null;
let watching = "";

function fill() {
  for (const gpu of last?.gpus ?? []) {
    const row = document.querySelector(`[data-gpu-row="${CSS.escape(gpu.uuid)}"]`);
    for (const cell of row?.querySelectorAll("[data-live-value]") ?? []) {
      const [value, unit] = SHOWN[cell.dataset.liveValue](gpu);
      const text = value === null || value === undefined ? "unknown" : `${value >= 10 ? Math.round(value) : value.toFixed(1)}\u00a0${unit}`;
      if (cell.textContent !== text) cell.textContent = text;
    }
  }
}

export function watchNodeGpus(root) {
  const table = root.querySelector("[data-gpu-table]");
  fill();
  if (watching === table.dataset.topic) return;
  watching = table.dataset.topic;
  subscribe(watching, (data) => {
    const sample = data?.kind === "backfill" ? data.last : data?.kind === "sample" ? data : null;
    if (sample?.gpus) { last = sample; fill(); }
  });
}
