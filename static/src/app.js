// The page's one module: starts the habits of every page, and loads charts, logs and launch only where they stand.
import { startDoor, startHandOver, startTimeZone } from "./door.js";
import { startKeys } from "./keys.js";
import { lookAgain, startLive } from "./live.js";
import { openPalette, startPalette } from "./palette.js";
import { applyProperties } from "./properties.js";
import { startAutoSubmit, startBulk, startCopy, startFocusKeeping, startPlaceKeeping, startTabs } from "./small.js";
import { startThemeSwitch } from "./theme-switch.js";
import { startTimes } from "./times.js";
import { startTips } from "./tips.js";
import { startUndo } from "./undo.js";

async function lookAt(swapped) {
  const root = swapped.parentElement ?? swapped; // a swapped element may be the part itself
  applyProperties(root);
  if (root.querySelector("[data-plot]")) (await import("./plots.js")).drawIn(root);
  if (root.querySelector("[data-log]")) (await import("./logs.js")).followIn(root);
  if (root.querySelector("[data-terminal]")) (await import("./terminal.js")).openIn(root);
  if (root.querySelector("[data-launch]")) (await import("./launch.js")).startLaunch(root);
  if (root.querySelector("[data-gpu-table]")) (await import("./node_values.js")).watchNode(root);
  if (root.querySelector("[data-quota-sheet]")) (await import("./quota_sheet.js")).startSheet(root);
  if (root.querySelector("[data-node]")) (await import("./squares.js")).watchIn(root);
}

startThemeSwitch();
startTabs();
startCopy();
startAutoSubmit();
startBulk();
startUndo();
startPalette();
startKeys(openPalette);
startDoor();
startTimeZone();
startHandOver();
startTimes();
startTips();
lookAt(document.body);
startLive();
startFocusKeeping();
startPlaceKeeping();
document.addEventListener("htmx:load", (event) => {
  if (event.target === document.body) return;
  lookAt(event.target);
  lookAgain();
});
