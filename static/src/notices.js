// Desktop notifications of notices, while a page is open: there is no push service. Several tabs show one, by its tag.
import { subscribe } from "./live.js";

export function startNotices() {
  if (!document.body.dataset.me || !window.Notification) return;
  subscribe("inbox.me", (data) => {
    if (data?.kind !== "notice" || !data.desktop || Notification.permission !== "granted") return;
    const shown = new Notification(data.title, { body: data.message, tag: data.notice });
    shown.addEventListener("click", () => { window.focus(); location.assign("/inbox/"); });
  });
  document.addEventListener("click", async (event) => {
    if (!event.target.closest("[data-desktop-ask]")) return;
    await Notification.requestPermission();
    showDesktopPermission(document.body);
  });
}

export function showDesktopPermission(root) {
  const state = window.Notification?.permission ?? "unsupported"; // also without HTTPS
  for (const part of root.querySelectorAll("[data-desktop]")) part.hidden = part.dataset.desktop !== state;
}
