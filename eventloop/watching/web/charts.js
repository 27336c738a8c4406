// Draw the curves with plotly: a chart for each scalar, with a line for each run and mode.
// A chart is drawn when it can be seen and has changed; a frame of the browser draws for at most 12 ms.

import { element, setText } from "./parts.js";

const MODES = ["train", "val", "test"];
const COLOURS = ["#2f6fde", "#d9730d", "#1b9663", "#b8388a"];
const DASHES = ["solid", "dash", "dot", "dashdot"];
const LATER = "Learning rates and times";
const FEW = 80; // points of a line with markers
const CONFIG = { displayModeBar: false, responsive: true, showSendToCloud: false, plotlyServerURL: "" };

export class Charts {
  constructor(root, none) {
    this.root = root;
    this.none = none;
    this.charts = new Map();
    this.groups = new Map();
    this.smoothing = 0;
    this.wanted = "";
    this.frame = 0;
    this.observer = new IntersectionObserver((entries) => {
      for (const entry of entries) this.charts.get(entry.target.dataset.name).visible = entry.isIntersecting;
      this.draw();
    }, { rootMargin: "200px" });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
  }

  // Use the changes of the curves of one run; `several` says whether lines have the colours of their runs.
  update(number, run, changes, several) {
    for (const change of changes.curves) {
      const chart = this.charts.get(change.name) ?? this.add(change);
      chart.update(number, run, change, several);
    }
    if (changes.all) {
      const names = new Set(changes.curves.map((change) => JSON.stringify([change.name, change.mode])));
      for (const chart of this.charts.values()) chart.keepOnly(number, names);
    }
    this.draw();
  }

  add(change) {
    const chart = new Chart(change.name, this);
    this.charts.set(change.name, chart);
    const at = change.name.indexOf("/");
    const group = change.later ? LATER : at > 0 ? change.name.slice(0, at) : "";
    if (change.name === "lr") this.group(group).prepend(chart.figure);
    else this.group(group).append(chart.figure);
    chart.figure.hidden = !chart.fits(this.wanted);
    this.observer.observe(chart.figure);
    return chart;
  }

  group(name) {
    if (!this.groups.has(name)) {
      const grid = element("div", { class: "grid" });
      const group = name === ""
        ? element("div", { class: "group" }, grid)
        : element("details", { class: "group", open: "" }, element("summary", { text: name }), grid);
      const before = name === "" ? this.root.firstElementChild : name === LATER ? null : this.groups.get(LATER)?.parentElement;
      this.root.insertBefore(group, before ?? null);
      this.groups.set(name, grid);
    }
    return this.groups.get(name);
  }

  find(text) {
    this.wanted = text.trim().toLowerCase();
    for (const chart of this.charts.values()) chart.figure.hidden = !chart.fits(this.wanted);
    for (const grid of this.groups.values()) grid.parentElement.hidden = ![...grid.children].some((each) => !each.hidden);
    this.none.hidden = this.charts.size === 0 || [...this.charts.values()].some((chart) => !chart.figure.hidden);
  }

  smooth(weight) {
    this.smoothing = weight;
    this.redraw();
  }

  redraw() {
    for (const chart of this.charts.values()) chart.dirty = true;
    this.draw();
  }

  // Load plotly.js, which takes a second, after all else is on the screen.
  load() {
    if (this.script) return;
    this.script = element("script", { src: document.querySelector("meta[name=plotly]").content });
    this.script.addEventListener("load", () => this.draw());
    document.head.append(this.script);
  }

  draw() {
    if (this.frame === 0 && window.Plotly) this.frame = requestAnimationFrame(() => this.drawSome());
  }

  drawSome() {
    this.frame = 0;
    const end = performance.now() + 12;
    for (const chart of this.charts.values()) {
      if (!chart.dirty || !chart.visible || chart.figure.hidden) continue;
      if (performance.now() > end) return this.draw();
      chart.draw();
    }
  }
}

class Chart {
  constructor(name, charts) {
    this.name = name;
    this.charts = charts;
    this.lines = new Map();
    this.visible = false;
    this.dirty = false;
    this.revision = 0;
    this.log = false;
    this.values = element("div", { class: "values" });
    this.plot = element("div", { class: "plot", role: "img" });
    this.button = element("button", { type: "button", "aria-pressed": "false", text: "log", title: "logarithmic axis" });
    this.button.setAttribute("aria-label", `logarithmic axis of ${name}`);
    this.button.addEventListener("click", () => {
      this.log = !this.log;
      this.button.setAttribute("aria-pressed", String(this.log));
      this.dirty = true;
      this.charts.draw();
    });
    const title = element("div", {}, element("h3", { text: name }), this.values);
    this.figure = element("figure", { class: "card chart" }, element("header", {}, title, this.button), this.plot);
    this.figure.dataset.name = name;
  }

  fits(wanted) {
    return this.lines.size > 0 && this.name.toLowerCase().includes(wanted);
  }

  update(number, run, change, several) {
    const key = JSON.stringify([number, change.mode]);
    if (!this.lines.has(key)) {
      this.lines.set(key, new Line(number, run, change.mode, several));
      this.lines = new Map([...this.lines].sort(([, a], [, b]) => a.order - b.order));
      this.values.replaceChildren(...[...this.lines.values()].map((line) => line.key));
      this.figure.hidden = !this.fits(this.charts.wanted);
    }
    this.lines.get(key).update(change);
    this.changed();
  }

  keepOnly(number, names) {
    for (const [key, line] of this.lines) {
      if (line.number !== number || names.has(JSON.stringify([this.name, line.mode]))) continue;
      this.lines.delete(key);
      line.key.remove();
      this.changed();
    }
    this.figure.hidden = !this.fits(this.charts.wanted);
  }

  changed() {
    const last = [...this.lines.values()].map((line) => `${line.label} ${line.last} at step ${line.lastStep}`);
    this.plot.setAttribute("aria-label", `${this.name}: ${last.join(", ")}`);
    this.dirty = true;
  }

  // The range of the axis for a line that is level, for which plotly would show -1 to 1 around it.
  constant() {
    const values = [...this.lines.values()].flatMap((line) => line.mean.filter((value) => value !== null));
    const level = values[0];
    return this.log || !level || values.some((value) => value !== level)
      ? {} : { range: [level - Math.abs(level) / 2, level + Math.abs(level) / 2] };
  }

  draw() {
    this.dirty = false;
    const traces = [...this.lines.values()].flatMap((line) => line.traces(this.charts.smoothing));
    const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const axis = { automargin: true, zeroline: false, fixedrange: false, nticks: 6 };
    window.Plotly.react(this.plot, traces, {
      autosize: true,
      height: 236,
      margin: { l: 8, r: 10, t: 10, b: 8 },
      showlegend: false,
      hovermode: "x unified",
      hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--text") } },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12 },
      xaxis: { ...axis, tickformat: "~s", hoverformat: ",d" },
      yaxis: { ...axis, type: this.log ? "log" : "linear", ...this.constant() },
      uirevision: String(this.log), // a zoom stays while points come
      datarevision: ++this.revision,
    }, CONFIG);
  }
}

class Line {
  constructor(number, run, mode, several) {
    const at = MODES.indexOf(mode);
    const place = at < 0 ? MODES.length : at;
    Object.assign(this, { number, mode, order: number * 10 + place, steps: [], mean: [], low: [], high: [] });
    this.colour = several ? run.colour : COLOURS[place];
    this.dash = several ? DASHES[place] : "solid";
    this.label = several ? `${run.name} ${mode}` : mode;
    const kind = { dash: "dash", dot: "dot-line", dashdot: "dash" }[this.dash] ?? "";
    this.value = element("b");
    this.key = element("span", {},
      element("i", { class: kind, style: { borderTopColor: this.colour }, "aria-hidden": "true" }), this.label, this.value);
  }

  update(change) {
    for (const name of ["steps", "mean", "low", "high"]) this[name].splice(change.start, Infinity, ...change[name]);
    this.last = change.last;
    this.lastStep = change.last_step;
    setText(this.value, change.last);
  }

  traces(smoothing) {
    const label = escaped(this.label);
    const common = { x: this.steps, type: "scatter", name: label };
    const band = { ...common, mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
    const found = this.low.length && !smoothing
      ? [{ ...band, y: this.low }, { ...band, y: this.high, fill: "tonexty", fillcolor: `${this.colour}33` }]
      : [];
    const line = { color: this.colour, dash: this.dash, width: 1.8 };
    const mode = this.steps.length <= FEW ? "lines+markers" : "lines";
    const drawn = { ...common, line, mode, marker: { size: 5, color: this.colour }, hovertemplate: "%{y:.5g}" };
    if (!smoothing) return [...found, { ...drawn, y: this.mean }];
    const raw = { ...drawn, y: this.mean, opacity: 0.25, hoverinfo: "skip", hovertemplate: undefined, mode: "lines" };
    return [raw, { ...drawn, y: smoothed(this.mean, smoothing), mode: "lines" }];
  }
}

// The exponential moving average without its bias towards 0 at the begin, as in TensorBoard.
function smoothed(values, weight) {
  let [sum, total] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

// plotly interprets some HTML in its texts.
function escaped(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}
