// Receive what the runs do as server-sent events, and show it.
// A hidden tab gives its connection back, because a browser has only six for all tabs of a page together;
// it then asks for one message every 15 seconds, so that its title stays true.

import { Charts } from "./charts.js";
import { Commands } from "./commands.js";
import { clone, setText, showFigures, showLines, showTable, showTime, timeOf } from "./parts.js";

const TABLES = ["handlers", "waits", "ranks", "queues", "checkpoints", "begun"];
const RETRY_MS = 5000;
const HIDDEN_MS = 15000;
const token = new URLSearchParams(location.hash.slice(1)).get("token") ?? "";
const charts = new Charts(document.getElementById("charts"), document.getElementById("none"));
const runs = [];
let source = null;
let silence = 0;
let silentMs = 8000;
let retry = 0;

function showLink(text, mood) {
  const link = document.getElementById("link");
  setText(link, text);
  link.className = mood;
}

class Run {
  constructor(number) {
    this.number = number;
    this.article = clone("run");
    this.detail = clone("detail");
    this.commands = new Commands(number, this.article, token);
    document.getElementById("runs").append(this.article);
    document.getElementById("details").append(this.detail);
  }

  update(parts, several) {
    if (parts.fixed) this.showFixed(parts.fixed, several);
    if (parts.head) this.showHead(parts.head);
    if (parts.health) showLines(this.article.querySelector(".health"), parts.health.slice(0, 5));
    if (parts.lines) {
      showLines(this.detail.querySelector(".notices"), parts.lines);
      this.detail.querySelector(".log").hidden = parts.lines.length === 0;
    }
    if (parts.time) showTime(this.detail.querySelector(".time"), parts.time);
    for (const name of TABLES) if (parts[name]) showTable(this.detail.querySelector(`[data-table=${name}]`), parts[name]);
    if (parts.notes) {
      this.detail.querySelector(".notes").replaceChildren(...parts.notes.map((note) => {
        const line = document.createElement("p");
        line.textContent = note;
        return line;
      }));
    }
    if (parts.curves) charts.update(this.number, this.fixed, parts.curves, several);
  }

  showFixed(fixed, several) {
    this.fixed = fixed;
    setText(this.article.querySelector(".name"), fixed.name);
    setText(this.detail.querySelector(".title"), fixed.name);
    this.detail.querySelector(".title").hidden = !several;
    const dot = this.article.querySelector(".dot");
    dot.style.background = fixed.colour;
    dot.hidden = !several;
    this.article.setAttribute("aria-label", fixed.name);
    this.article.querySelector(".progress").setAttribute("aria-label", `progress of ${fixed.name}`);
    this.commands.name(fixed.name);
  }

  showHead(head) {
    this.head = head;
    const state = this.article.querySelector(".state");
    setText(state, head.state);
    state.className = `state ${head.mood}`;
    setText(this.article.querySelector(".sentence"), head.sentence);
    setText(this.article.querySelector(".path"), head.host ? `${head.path} · ${head.host}` : head.path);
    setText(this.article.querySelector(".begun"), head.begun);
    const progress = this.article.querySelector(".progress");
    progress.hidden = head.done === null;
    const percent = Math.floor(100 * (head.done ?? 0));
    progress.setAttribute("aria-valuenow", String(percent));
    progress.firstElementChild.style.width = `${100 * (head.done ?? 0)}%`;
    setText(progress.lastElementChild, `${percent} %`);
    showFigures(this.article.querySelector(".figures"), head.figures);
    this.commands.enable(head);
  }
}

function receive(message) {
  const several = message.runs.length > 1;
  if (message.interval) silentMs = 3000 * message.interval + 5000;
  document.getElementById("details").classList.toggle("several", several);
  message.runs.forEach((parts, number) => {
    runs[number] ??= new Run(number);
    runs[number].update(parts, several);
  });
  if (message.commands) {
    for (const run of runs) run.commands.show(message.commands.filter((sent) => sent.run === run.number));
  }
  document.getElementById("curves").hidden = charts.charts.size === 0;
  showTitle();
  if (charts.charts.size) requestAnimationFrame(() => setTimeout(() => charts.load()));
}

function showTitle() {
  const known = runs.filter((run) => run.head);
  const ill = known.some((run) => run.head.mood === "bad") ? "⚠ " : "";
  const texts = known.map(({ head, fixed }) => `${head.done === null ? head.state : `${Math.floor(100 * head.done)} %`} ${fixed.name}`);
  const title = `${ill}${texts.slice(0, 3).join(" · ")} – eventloop watch`;
  if (document.title !== title) document.title = title;
}

function connect({ once = false } = {}) {
  disconnect();
  source = new EventSource(`/events?token=${encodeURIComponent(token)}`);
  listenForSilence();
  source.onmessage = (event) => {
    receive(JSON.parse(event.data));
    showLink("live", "good");
    if (once) disconnect();
    else listenForSilence();
  };
  source.onerror = () => {
    const refused = source?.readyState === EventSource.CLOSED;
    showLink(refused ? "no access: open the address that eventloop watch has printed" : "the server has ended, trying again", "bad");
    if (refused) retry = setTimeout(resume, RETRY_MS);
  };
}

function disconnect() {
  source?.close();
  source = null;
  clearTimeout(silence);
  clearTimeout(retry);
}

function listenForSilence() {
  clearTimeout(silence);
  silence = setTimeout(() => showLink(`nothing new since ${timeOf(Date.now() / 1000 - silentMs / 1000)}`, "bad"), silentMs);
}

function resume() {
  if (document.hidden) disconnect();
  else connect();
}

document.addEventListener("visibilitychange", resume);
setInterval(() => document.hidden && connect({ once: true }), HIDDEN_MS);
addEventListener("hashchange", () => location.reload());
document.getElementById("skip").addEventListener("click", () => document.getElementById("curves").focus());
document.getElementById("find").addEventListener("input", (event) => charts.find(event.target.value));
document.getElementById("smoothing").addEventListener("input", (event) => {
  setText(document.getElementById("smoothed"), event.target.value);
  charts.smooth(Number(event.target.value));
});
if (token) connect();
else showLink("no access: open the address that eventloop watch has printed, with its token", "bad");
