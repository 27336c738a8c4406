"use strict";
// Draws the charts of the page: each when it comes near the window, the others while nothing else is to do; and anew
// when light turns to dark, or a window becomes as narrow as a telephone's.
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const dark = asked("(prefers-color-scheme: dark)");
  const phone = asked("(max-width: 600px)");
  const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", Arial, sans-serif';
  const COLOURS = {
    light: {
      text: "#1d2430", quiet: "#5d6777", grid: "#e8ebef", line: "#c9cfd8", card: "#ffffff", paper: "#ffffff", inside: "#ffffff",
      data: "#d98a1f", forward: "#3f83d6", backward: "#2a5796", optimizer: "#7a5cc4", hooks: "#15967b", unaccounted: "#8e98a6",
      busy: "#3f83d6", muted: "#8e98a6", bad: "#d23b3b", failed: "#8c1d40",
      run0: "#2f6fde", run1: "#d9730d", run2: "#1b9663", run3: "#b8388a", run4: "#7650cf", run5: "#0c8fa3", run6: "#8a5a2b", run7: "#6b7686",
    },
    dark: {
      text: "#e4e8ef", quiet: "#9aa5b5", grid: "#2a313d", line: "#465062", card: "#222936", paper: "#1a1f28", inside: "#0f1319",
      data: "#eba94f", forward: "#74aef5", backward: "#4a7fca", optimizer: "#a98bf5", hooks: "#3fc7a6", unaccounted: "#8592a4",
      busy: "#74aef5", muted: "#8592a4", bad: "#ff6b62", failed: "#f08fb4",
      run0: "#6aa1ff", run1: "#f0a04b", run2: "#4cc38a", run3: "#e879c0", run4: "#a98bf5", run5: "#4cc4d6", run6: "#c79a6b", run7: "#9aa5b5",
    },
  };
  const COLOUR_KEYS = new Set(["color", "fillcolor", "gridcolor", "linecolor", "zerolinecolor", "bgcolor", "bordercolor", "tickcolor", "spikecolor", "paper_bgcolor", "plot_bgcolor"]);
  const CONFIG = {
    displaylogo: false, responsive: true, showSendToCloud: false, plotlyServerURL: "", // nothing leaves the page
    modeBarButtonsToRemove: ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d"],
    toImageButtonOptions: { format: "svg", filename: "eventloop-report" },
  };
  const NOISY = 8; // times that a curve goes as far as from its least to its greatest value
  const STUCK = 2000; // ms after which a drawing that has not ended is not waited for
  const WINDOWS = 80; // as many windows of the moving average as fit into a curve
  const switches = { logarithmic: false, smooth: true };

  // Its `matches` is the last one that was told of, and is asked for once: Chromium tells nobody of a change that a read of
  // `matches` saw first, and the charts drawn before such a read would stay as they were.
  function asked(query) {
    const media = window.matchMedia(query);
    const answer = { matches: media.matches, changed: () => {} };
    media.addEventListener("change", ({ matches }) => { answer.matches = matches; answer.changed(); });
    return answer;
  }

  function colour(name) { // "@run0" or "@run0/0.2"
    const [key, alpha] = name.slice(1).split("/");
    const hex = COLOURS[dark.matches ? "dark" : "light"][key];
    if (!alpha) return hex;
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    return `rgba(${r},${g},${b},${alpha})`;
  }

  function coloured(value, key) {
    if (typeof value === "string") return COLOUR_KEYS.has(key) && value.startsWith("@") ? colour(value) : value;
    if (Array.isArray(value)) return key === "x" || key === "y" ? value : value.map((item) => coloured(item, key));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, coloured(item, name)]));
  }

  function merged(base, more) {
    const result = { ...base };
    for (const [key, value] of Object.entries(more)) {
      const plain = value !== null && typeof value === "object" && !Array.isArray(value);
      result[key] = plain && result[key] ? merged(result[key], value) : value;
    }
    return result;
  }

  function layoutOf(chart) {
    const axis = {
      gridcolor: "@grid", linecolor: "@line", zeroline: false, automargin: true, ticks: "", ticklabelstandoff: 4,
      exponentformat: "power", minexponent: 5, title: { font: { size: 12, color: "@quiet" }, standoff: 8 }, tickfont: { size: 12, color: "@quiet" },
    };
    const legend = { orientation: "h", x: 0, xanchor: "left", y: 1, yanchor: "bottom", bgcolor: "rgba(0,0,0,0)", font: { size: 12, color: "@text" } };
    const spike = { showspikes: true, spikemode: "across", spikecolor: "@quiet", spikethickness: 1, spikedash: "solid" };
    const names = chart.layout.yaxis && chart.layout.yaxis.ticktext; // names are what one reads first
    const base = {
      height: chart.height, margin: { l: 10, r: 14, t: chart.layout.showlegend ? 34 : 14, b: 4 }, autosize: true,
      paper_bgcolor: "@paper", plot_bgcolor: "@paper", dragmode: "zoom",
      font: { family: FONT, size: 12, color: "@text" }, modebar: { bgcolor: "rgba(0,0,0,0)", color: "@quiet", activecolor: "#888" },
      hoverlabel: { bgcolor: "@card", bordercolor: "@line", font: { family: FONT, size: 12, color: "@text" }, namelength: -1, align: "left" },
      ...(chart.layout.showlegend ? { legend } : {}),
      xaxis: chart.layout.hovermode === "x unified" ? merged(axis, spike) : axis, yaxis: names ? merged(axis, { tickfont: { size: 12, color: "@text" } }) : axis,
      ...(chart.layout.xaxis2 ? { xaxis2: axis } : {}),
    };
    const layout = merged(base, chart.layout);
    if (phone.matches && chart.narrow.length) layout.yaxis = merged(layout.yaxis, { ticktext: chart.narrow, tickfont: { size: 10 } });
    if (chart.kind === "curve" && switches.logarithmic) {
      const { range: _, ...yaxis } = layout.yaxis; // that of a linear axis
      layout.yaxis = { ...yaxis, type: "log" };
    }
    return coloured(layout);
  }

  // A band between the least and the greatest values that a point stands for, below its mean.
  function band(trace, group) {
    const seen = trace.x.map((_, at) => at).filter((at) => trace.band.low[at] !== null);
    const edge = (values) => ({
      type: "scatter", mode: "lines", x: seen.map((at) => trace.x[at]), y: seen.map((at) => values[at]), line: { width: 0, color: trace.band.color },
      hoverinfo: "skip", showlegend: false, legendgroup: group,
    });
    return [edge(trace.band.low), { ...edge(trace.band.high), fill: "tonexty", fillcolor: trace.band.color }];
  }

  // The moving average of a curve that goes up and down all the time; of another one nothing.
  function smoothed(values) {
    let low = Infinity, high = -Infinity, way = 0, last = null;
    for (const value of values) {
      if (value === null) continue;
      low = Math.min(low, value); high = Math.max(high, value);
      if (last !== null) way += Math.abs(value - last);
      last = value;
    }
    const half = Math.floor(values.length / WINDOWS / 2);
    if (half < 2 || way <= NOISY * (high - low)) return null;
    return averaged(averaged(values, half), half); // twice: a spike becomes a hill, not a block
  }

  function averaged(values, half) {
    const sums = [0], counts = [0];
    values.forEach((value, at) => {
      sums.push(sums[at] + (value ?? 0)); counts.push(counts[at] + (value === null ? 0 : 1));
    });
    return values.map((value, at) => {
      const from = Math.max(0, at - half), to = Math.min(values.length, at + half + 1);
      return value === null ? null : (sums[to] - sums[from]) / (counts[to] - counts[from]);
    });
  }

  function pale(line) { return { ...line, width: 1, color: `${line.color}/0.35` }; }

  function dataOf(chart) {
    const bands = [], means = [], averages = [];
    chart.data.forEach((trace, number) => {
      const group = `curve${number}`;
      const { band: edges, ...mean } = { ...trace, legendrank: 1000 + number };
      if (edges) {
        bands.push(...band(trace, group));
        mean.customdata = edges.low.map((low, at) => [low, edges.high[at]]);
        mean.hovertemplate = "%{y:.5g}  (%{customdata[0]:.4g} … %{customdata[1]:.4g})";
      }
      const average = chart.kind === "curve" && switches.smooth ? smoothed(trace.y) : null;
      if (average) { // the legend shows the strong line, the hover the values
        const { hovertemplate: _, customdata: __, ...strong } = mean;
        averages.push({ ...strong, y: average, legendgroup: group, hoverinfo: "skip", line: { ...trace.line, width: 2 } });
        Object.assign(mean, { line: pale(trace.line), showlegend: false });
      }
      means.push(chart.kind === "curve" ? { ...mean, legendgroup: group } : mean);
    });
    return coloured([...bands, ...means, ...averages]);
  }

  const places = [...document.querySelectorAll(".chart")];
  const drawn = new Set();
  const drawing = new Map(); // place -> the drawing under way: one that begins meanwhile would be lost in it
  function draw(place) {
    const chart = charts[Number(place.dataset.chart)];
    const react = () => Plotly.react(place, dataOf(chart), layoutOf(chart), CONFIG);
    drawn.add(place);
    const before = drawing.get(place);
    const late = () => new Promise((go) => setTimeout(go, STUCK));
    const done = before ? Promise.race([before, late()]).then(react, react) : react();
    const over = () => { if (drawing.get(place) === done) drawing.delete(place); };
    drawing.set(place, done);
    done.then(over, over);
    return done;
  }
  const near = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) { near.unobserve(target); draw(target); }
    }
  }, { rootMargin: "800px" });
  for (const place of places) {
    place.style.minHeight = `${charts[Number(place.dataset.chart)].height}px`;
    near.observe(place);
  }
  dark.changed = () => drawn.forEach(draw);
  phone.changed = () => {
    for (const place of drawn) if (charts[Number(place.dataset.chart)].narrow.length) draw(place);
  };
  window.addEventListener("beforeprint", () => places.forEach(draw));
  const whenIdle = window.requestIdleCallback || ((next) => setTimeout(next, 50)); // Safari has none
  function drawNext() { // one at a time, so that the page answers meanwhile
    const place = places.find((each) => !drawn.has(each));
    if (!place) return;
    near.unobserve(place);
    draw(place);
    whenIdle(drawNext);
  }
  window.addEventListener("load", () => whenIdle(drawNext));
  for (const name of Object.keys(switches)) {
    const box = document.getElementById(name);
    if (!box) continue;
    switches[name] = box.checked; // a browser that reloads the page keeps what was chosen
    box.addEventListener("change", () => {
      switches[name] = box.checked;
      for (const place of drawn) if (charts[Number(place.dataset.chart)].kind === "curve") draw(place);
    });
  }
})();
