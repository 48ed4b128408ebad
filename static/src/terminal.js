// A terminal in a running job: asks for one, then carries what is typed and printed over its socket.
// Binary messages are typed and printed bytes; text messages are JSON: sizes and what has been shown so far from here,
// how it ended from there (agents/node/terminals/terminal.py).
import { FitAddon } from "@xterm/addon-fit";
import { Terminal } from "@xterm/xterm";

const ASK_EVERY_MS = 120;
const ASKED_AT_MOST_MS = 20_000;
const TYPED_AT_ONCE = 16 * 1024;
const SAY_SEEN_EVERY = 32 * 1024;
const RIGHT_ENDED = 1008;
const READER = "fairway-terminal-reader";

// The page's policy takes no style element without its nonce, and no style attribute that is set as text; xterm makes
// both. What this page makes from here on bears the nonce, and has such an attribute set through the object model.
function keepPolicy() {
  const nonce = document.querySelector("script[nonce]").nonce;
  document.createElement = (name, ...more) => {
    const element = Document.prototype.createElement.call(document, name, ...more);
    if (name.toLowerCase() === "style") element.nonce = nonce;
    element.setAttribute = (key, value) => {
      if (key === "style") element.style.cssText = value;
      else Element.prototype.setAttribute.call(element, key, value);
    };
    return element;
  };
}

function coloursOf(box) {
  const look = getComputedStyle(box);
  const dark = look.colorScheme === "dark" || (look.colorScheme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
  const line = dark ? "#2a4a3b" : "#bcdccb";
  return { background: look.backgroundColor, foreground: look.color, cursor: look.color, cursorAccent: look.backgroundColor, selectionBackground: line };
}

const ENDS = {
  exited: (word) => (word.exit_code ? `The shell has ended with ${word.exit_code}.` : "The shell has ended."),
  idle: () => "Nobody has typed for long, so it was closed.",
  task_ended: () => "The job has ended, and its terminals with it.",
};

class Session {
  constructor(term, say, ended) {
    this.term = term;
    this.say = say;
    this.ended = ended;
    this.printed = 0;
    this.told = 0;
    this.last = "";
  }

  async open(form) {
    const wanted = new FormData(form);
    wanted.set("cols", this.term.cols);
    wanted.set("rows", this.term.rows);
    const answer = await fetch(form.action, { method: "POST", body: wanted, headers: { Accept: "application/json" } });
    let told = await answer.json();
    const until = Date.now() + ASKED_AT_MOST_MS;
    const { state } = told;
    while (!told.refusal && !told.listens) {
      if (Date.now() > until) throw new Error("The node takes too long.");
      await new Promise((go) => { setTimeout(go, ASK_EVERY_MS); });
      told = await (await fetch(state, { headers: { Accept: "application/json" } })).json();
    }
    if (told.refusal) throw new Error(told.refusal);
    const place = new URL(told.socket, location.href);
    place.protocol = place.protocol.replace("http", "ws");
    this.socket = new WebSocket(place);
    this.socket.binaryType = "arraybuffer";
    this.socket.addEventListener("open", () => { this.say(""); this.resize(); });
    this.socket.addEventListener("message", (event) => this.hear(event.data));
    this.socket.addEventListener("close", (event) => this.close(event.code));
  }

  get isOpen() { return this.socket?.readyState === WebSocket.OPEN; }

  hear(data) {
    if (typeof data === "string") {
      const word = JSON.parse(data);
      this.last = ENDS[word.ended]?.(word) ?? "It has ended.";
      return;
    }
    this.term.write(new Uint8Array(data), () => {
      this.printed += data.byteLength;
      if (this.printed - this.told < SAY_SEEN_EVERY || !this.isOpen) return;
      this.told = this.printed;
      this.socket.send(JSON.stringify({ seen: this.printed }));
    });
  }

  type(bytes) {
    if (!this.isOpen) return;
    for (let at = 0; at < bytes.length; at += TYPED_AT_ONCE) this.socket.send(bytes.subarray(at, at + TYPED_AT_ONCE));
  }

  resize() {
    if (this.isOpen) this.socket.send(JSON.stringify({ cols: this.term.cols, rows: this.term.rows }));
  }

  close(code) {
    if (!this.last) this.last = code === RIGHT_ENDED ? "It is no longer open to you." : "The connection was lost, and the shell ended with it.";
    this.ended(this.last);
  }
}

function start(part) {
  const box = part.querySelector("[data-terminal-box]");
  const form = part.querySelector("[data-terminal-form]");
  const foot = part.querySelector("[data-terminal-foot]");
  const anew = form.querySelector("button");
  const reader = part.querySelector("[data-terminal-reader]");
  const say = (words) => { foot.textContent = words || "Connected."; };
  keepPolicy();
  const term = new Terminal({
    fontFamily: getComputedStyle(box).fontFamily,
    fontSize: 13,
    minimumContrastRatio: 4.5,
    scrollback: 5000,
    theme: coloursOf(box),
  });
  const fit = new FitAddon();
  term.loadAddon(fit);
  term.open(box);
  fit.fit();
  let session = null;
  const words = new TextEncoder();
  const begin = async () => {
    anew.hidden = true;
    say("Opening …");
    session = new Session(term, say, (why) => { say(why); anew.hidden = false; });
    try {
      await session.open(form);
      term.focus();
    } catch (problem) {
      say(problem.message);
      anew.hidden = false;
    }
  };
  try { term.options.screenReaderMode = reader.checked = localStorage.getItem(READER) === "1"; } catch { /* it is off */ }
  reader.addEventListener("change", () => {
    term.options.screenReaderMode = reader.checked;
    try { localStorage.setItem(READER, reader.checked ? "1" : "0"); } catch { /* for this page, then */ }
    term.focus();
  });
  term.onData((typed) => session.type(words.encode(typed)));
  term.onBinary((typed) => session.type(Uint8Array.from(typed, (letter) => letter.charCodeAt(0))));
  term.onResize(() => session?.resize());
  term.attachCustomKeyEventHandler((event) => {
    if (event.key === "F6" && event.shiftKey) { // the way out: Tab belongs to the shell
      if (event.type === "keydown") reader.focus();
      event.preventDefault();
      return false;
    }
    if (event.ctrlKey && event.shiftKey && event.key.toLowerCase() === "c" && term.hasSelection()) {
      if (event.type === "keydown") document.execCommand("copy");
      event.preventDefault();
      return false;
    }
    return true;
  });
  new ResizeObserver(() => fit.fit()).observe(box);
  const recolour = () => { term.options.theme = coloursOf(box); };
  addEventListener("fairway-colours", recolour);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  form.addEventListener("submit", (event) => { event.preventDefault(); term.reset(); begin(); });
  begin();
}

export function openTerminals(root) {
  for (const part of root.querySelectorAll("[data-terminal]:not([data-started])")) {
    part.setAttribute("data-started", "");
    start(part);
  }
}
