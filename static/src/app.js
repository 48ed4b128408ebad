// Entry point: starts the behaviors of every page, and loads charts, logs and launch only on pages that have them.
import { startCodeLink, submitTicket, startTimeZone } from "./auth_links.js";
import { startKeys } from "./keyboard_shortcuts.js";
import { updateSubscriptions, startLive } from "./live.js";
import { forgetSentDraft } from "./drafts.js";
import { openPalette, startPalette } from "./command_palette.js";
import { applyProperties } from "./css_properties.js";
import { startAutoSubmit, startBulk, startChosenRows, startCopy, startDialogs, keepFocus, keepFiltersInAddress, keepScrollAndOpenState, startRunLinks, startTabs } from "./page_behaviors.js";
import { showDesktopPermission, startNotices } from "./notices.js";
import { startThemeSwitch } from "./theme-switch.js";
import { startTimes } from "./relative_times.js";
import { startTips } from "./tooltips.js";
import { startUndo } from "./delayed_submit.js";

async function initialize(swapped) {
  const root = swapped.parentElement ?? swapped; // a swapped element may be the part itself
  applyProperties(root);
  showDesktopPermission(root);
  if (root.querySelector("[data-plot]")) (await import("./charts.js")).drawCharts(root);
  if (root.querySelector("[data-run-charts]")) (await import("./run_charts.js")).drawRunCharts(root);
  if (root.querySelector("[data-parallel]")) (await import("./parallel_ranges.js")).startRanges(root);
  if (root.querySelector("[data-log]")) (await import("./logs.js")).followLogs(root);
  if (root.querySelector("[data-terminal]")) (await import("./terminal.js")).openTerminals(root);
  if (root.querySelector("[data-launch]")) (await import("./launch.js")).startLaunch(root);
  if (root.querySelector("#change[data-amounts]")) (await import("./amounts.js")).startAmounts(root.querySelector("#change"));
  if (root.querySelector("[data-gpu-table]")) (await import("./node_gpu_values.js")).watchNodeGpus(root);
  if (root.querySelector("[data-quota-sheet]")) (await import("./editable_sheet.js")).startSheet(root);
  if (root.querySelector("[data-node]")) (await import("./gpu_squares.js")).watchGpuSquares(root);
}

startThemeSwitch();
startTabs();
startCopy();
startDialogs();
startAutoSubmit();
startRunLinks();
startBulk();
startChosenRows();
startUndo();
startPalette();
startKeys(openPalette);
startCodeLink();
startTimeZone();
submitTicket();
startTimes();
startTips();
forgetSentDraft();
initialize(document.body);
startNotices();
startLive();
keepFocus();
keepScrollAndOpenState();
keepFiltersInAddress();
document.addEventListener("htmx:load", (event) => {
  if (event.target === document.body) return;
  initialize(event.target);
  updateSubscriptions();
});
