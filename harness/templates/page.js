"use strict";
const records = JSON.parse(document.getElementById("data").textContent);
const table = document.getElementById("board");
const bodies = [...table.tBodies];
const filters = document.getElementById("filters");

// Sorting: within each run, so that rows which do not compare never mix. Empty cells stay last.
function key(row, column) {
  const cell = row.cells[column];
  return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent.trim().toLowerCase();
}
function compare(a, b) {
  if (typeof a === typeof b) return typeof a === "number" ? a - b : a.localeCompare(b);
  return typeof a === "number" ? -1 : 1;
}
function sort(header) {
  const descending = header.getAttribute("aria-sort") === "ascending";
  for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
  header.setAttribute("aria-sort", descending ? "descending" : "ascending");
  for (const body of bodies) {
    const rows = [...body.querySelectorAll(".row")].map((row) => [key(row, header.cellIndex), row]);
    rows.sort(([a], [b]) => (a === "" || b === "" ? (a === "") - (b === "") : compare(a, b) * (descending ? -1 : 1)));
    body.append(...rows.map(([, row]) => row));
  }
}
for (const button of table.tHead.querySelectorAll("button")) {
  button.addEventListener("click", () => sort(button.parentElement));
}

function filter() {
  const asked = Object.fromEntries(new FormData(filters));
  const words = asked.text.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const body of bodies) {
    const kept = (!asked.run || body.dataset.run === asked.run) && (!asked.measured || body.dataset.kind === "measured");
    let any = false;
    const group = body.rows[0].textContent.toLowerCase();
    for (const row of body.querySelectorAll(".row")) {
      const text = group + row.textContent.toLowerCase();
      row.hidden = !(kept && words.every((word) => text.includes(word))
        && ["execution", "states", "status"].every((name) => !asked[name] || row.dataset[name] === asked[name]));
      any ||= !row.hidden;
      shown += !row.hidden;
    }
    body.hidden = !any;
  }
  for (const figure of document.querySelectorAll("figure")) {
    figure.hidden = Boolean(asked.run) && !figure.dataset.run.split(" ").includes(asked.run);
  }
  document.getElementById("count").textContent = `${shown} of ${table.querySelectorAll(".row").length} rows`;
  document.getElementById("none").hidden = shown > 0;
}
filters.addEventListener("input", filter);
filters.addEventListener("submit", (event) => event.preventDefault());
document.querySelector("#none button").addEventListener("click", () => { filters.reset(); filter(); filters.elements.text.focus(); });
filter();

// A record. Everything in it is text that somebody's run wrote: it is only ever set as text.
function make(name, text = "", ...children) {
  const node = document.createElement(name);
  node.textContent = text;
  node.append(...children);
  return node;
}
function facts(pairs) {
  const list = make("dl");
  for (const [name, value] of pairs) {
    if (value === null || value === undefined || value === "") continue;
    list.append(make("dt", name), make("dd", typeof value === "object" ? JSON.stringify(value) : String(value)));
  }
  return list;
}
function chart(series, label) {
  const [height, left, bottom] = [150, 52, 20];
  const width = Math.max(260, Math.min(640, innerWidth - 56));  // a unit is a pixel: text keeps its size
  const all = series.flat();
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const shape = (name, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };
  const y = (value) => 8 + (height - bottom - 12) * (high > low ? (high - value) / (high - low) : 0.5);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": label });
  for (const value of high > low ? [low, high] : [low]) {
    const text = shape("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" });
    text.textContent = value.toPrecision(4);
    svg.append(text, shape("line", { x1: left, x2: width, y1: y(value), y2: y(value) }));
  }
  const caption = shape("text", { x: left, y: height - 4 });
  caption.textContent = label;
  series.forEach((values, i) => {
    const step = (width - left - 4) / Math.max(values.length - 1, 1);
    const points = values.map((value, n) => `${left + n * step},${y(value)}`).join(" ");
    svg.append(shape("polyline", { points, class: i ? "second" : "" }));
  });
  svg.append(caption);
  return svg;
}
function show(record) {
  document.getElementById("record-title").textContent = record.title;
  const parts = [facts(Object.entries(record.facts))];
  if (record.notes) parts.push(make("h3", "Notes"), make("p", record.notes));
  for (const pass of record.passes) {
    parts.push(make("h3", `Pass ${pass.repeat + 1} of the run, ${pass.date}`));
    if (pass.samples_ms.length) {
      parts.push(chart([pass.samples_ms], `ms of each of ${pass.samples_ms.length} timed steps, in order`));
      const raw = make("pre", pass.samples_ms.map((ms) => ms.toFixed(3)).join("  "));
      const warm = make("pre", pass.warmup_ms.map((ms) => ms.toFixed(3)).join("  "));
      parts.push(make("details", "", make("summary", "Raw samples, ms"), raw, make("p", "Warm-up, ms"), warm));
    } else {
      parts.push(make("p", `${pass.status}: no steps were timed.`));
    }
    if (pass.log) parts.push(make("details", "", make("summary", "Log"), make("pre", pass.log)));
  }
  const gate = record.gate;
  if (gate) parts.push(make("h3", "Gate"));
  if (gate?.losses?.every(Number.isFinite)) {
    parts.push(chart([gate.losses, gate.reference_losses], "loss of each step; dashed: AdamW with fp32 weights and states"));
  }
  if (gate) parts.push(facts([["result", record.gate_result || "not run"], ...Object.entries(gate)]));
  if (record.command) parts.push(make("h3", "Command"), make("pre", record.command));
  if (record.environment) parts.push(make("h3", "Environment"), facts(Object.entries(record.environment)));
  document.getElementById("record-body").replaceChildren(...parts);
  const dialog = document.getElementById("record");
  dialog.showModal();
  dialog.scrollTop = 0;
}
for (const row of table.querySelectorAll(".row")) {
  row.addEventListener("click", () => {
    row.querySelector(".method button").focus();  // where the focus returns to
    show(records[Number(row.dataset.record)]);
  });
}
