// Make elements of texts, and change them in place. Texts are always set as texts, never as HTML.

export function element(tag, fields = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(fields)) {
    if (name === "text") made.textContent = value;
    else if (name === "style") Object.assign(made.style, value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

export function clone(id) {
  return document.getElementById(id).content.firstElementChild.cloneNode(true);
}

export function timeOf(seconds) {
  if (seconds === null) return "";
  const at = new Date(seconds * 1000);
  const clock = at.toTimeString().slice(0, 8);
  const today = new Date().toDateString() === at.toDateString();
  return today ? clock : `${String(at.getMonth() + 1).padStart(2, "0")}-${String(at.getDate()).padStart(2, "0")} ${clock}`;
}

export function showFigures(list, figures) {
  while (list.children.length > figures.length) list.lastElementChild.remove();
  figures.forEach(([name, value, remark], number) => {
    const cell = list.children[number]
      ?? list.appendChild(element("div", {}, element("dt"), element("dd", {}, element("span"), element("small"))));
    setText(cell.querySelector("dt"), name);
    setText(cell.querySelector("dd span"), value);
    setText(cell.querySelector("dd small"), remark);
  });
}

export function showLines(list, lines) {
  list.replaceChildren(...lines.map((line) => element("li", {},
    ...(line.time === null ? [] : [element("time", { text: timeOf(line.time) })]),
    ...(line.iter === null ? [] : [element("span", { class: "at", text: line.iter.toLocaleString("en") })]),
    element("span", { class: "text", text: line.text }))));
}

export function showTable(card, table) {
  card.hidden = table.rows.length === 0 && table.note === "";
  if (table.rows.length === 0) {
    card.replaceChildren(element("h3", { text: table.title }), ...remarks(table.note));
    card.hidden = table.title !== "Checkpoints" || table.note === "";
    return;
  }
  const kind = (column) => (column >= table.left ? "number" : column > 0 ? "text" : "");
  const head = table.header.map((name, column) => element("th", { scope: "col", class: kind(column), text: name }));
  const rows = table.rows.map((row, number) => {
    const cells = row.map((text, column) => element("td", { class: kind(column), "data-name": table.header[column], text }));
    if (table.bars.length) {
      const width = `${(100 * table.bars[number]).toFixed(1)}%`;
      cells[0].append(element("span", { class: "meter", "aria-hidden": "true" }, element("i", { style: { width } })));
    }
    return element("tr", table.bad.includes(number) ? { class: "ill" } : {}, ...cells);
  });
  const whole = element("table", {}, element("caption", { text: table.title }),
    element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
  const scroll = card.querySelector(".scroll")?.scrollTop ?? 0;
  const box = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": table.title }, whole);
  card.replaceChildren(box, ...remarks(table.note));
  box.scrollTop = scroll;
}

function remarks(note) {
  return note === "" ? [] : [element("p", { class: "remark", text: note })];
}

export function showTime(card, time) {
  card.hidden = time.phases.length === 0;
  setText(card.querySelector(".iteration"), time.iteration ? `· ${time.iteration}` : "");
  const share = (phase) => `${(100 * phase.share).toFixed(phase.share < 0.0995 ? 1 : 0)} %`;
  const shown = time.phases.filter((phase) => phase.share >= 0.0005);
  const stack = card.querySelector(".stack");
  stack.setAttribute("aria-label", shown.map((phase) => `${phase.name} ${share(phase)}`).join(", "));
  stack.replaceChildren(...shown.map((phase) => element("div", {
    style: { background: phase.colour, width: `${100 * phase.share}%` }, title: `${phase.name} ${phase.seconds}, ${share(phase)}`,
  })));
  card.querySelector(".keys").replaceChildren(...shown.map((phase) => element("li", {},
    element("i", { style: { background: phase.colour }, "aria-hidden": "true" }),
    `${phase.name} `, element("b", { text: share(phase) }), element("span", { text: ` ${phase.seconds}` }))));
  card.querySelector(".advice").replaceChildren(
    ...[time.slow_rank, ...time.advice].filter(Boolean).map((text) => element("p", { text })));
  setText(card.querySelector(".written"), time.written === null ? "" : `costs.json of ${timeOf(time.written)}`);
}
