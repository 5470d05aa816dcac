// The data of the page, its texts and its elements. `DATA` is what plan_data.py wrote; `PLANS` are its plans as records.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);

// --- data ------------------------------------------------------------------------------------------------------------

function readTable(table) {
  const columns = Object.entries(table.columns);
  return table.rows.map((row, index) => {
    const record = { index };
    columns.forEach(([name, kind], i) => (record[name] = kind === "text" ? DATA.strings[row[i]] : row[i]));
    return record;
  });
}

function readPlan(raw) {
  const plan = { ...raw };
  const tables = ["program", "messages", "alternatives", "inputs", "outputs", "redundant", "lines"];
  for (const name of tables) plan[name] = readTable(raw[name]);
  plan.values = readTable(raw.memory.values);
  plan.events = raw.clock ? readTable(raw.clock.events) : [];
  linkRows(plan);
  plan.heat = lineHeat(plan);
  plan.levels = memoryLevels(plan);
  plan.peak = plan.levels.reduce((best, level, step) => (level > plan.levels[best] ? step : best), 0);
  return plan;
}

/** Gives every row its children, and groups the sums of what is below them. */
function linkRows(plan) {
  plan.top = [];
  for (const row of plan.program) {
    row.children = [];
    row.all = { bytes: row.bytes * row.total, flops: row.flops * row.total, messages: row.message >= 0 ? row.total : 0 };
    (row.parent < 0 ? plan.top : plan.program[row.parent].children).push(row);
    if (row.message >= 0) plan.messages[row.message].row = row.index;
  }
  for (const row of [...plan.program].reverse()) {
    if (row.parent < 0) continue;
    const above = plan.program[row.parent].all;
    for (const figure of Object.keys(above)) above[figure] += row.all[figure];
  }
}

/** Sums bytes, FLOPs and redundant FLOPs by source line. */
function lineHeat(plan) {
  const heat = plan.lines.map(() => ({ bytes: 0, flops: 0, redundant: 0, messages: [], calls: [] }));
  for (const row of plan.program) {
    if (row.line < 0) continue;
    const line = heat[row.line];
    line.bytes += row.all.bytes;
    line.flops += row.all.flops;
    if (row.message >= 0) line.messages.push(row.message);
    else if (row.kind === "call") line.calls.push(row.index);
  }
  for (const work of plan.redundant) if (work.line >= 0) heat[work.line].redundant += work.flops;
  return heat;
}

/** Returns the bytes in use at every step. */
function memoryLevels(plan) {
  const changes = new Array(plan.memory.steps + 2).fill(0);
  for (const value of plan.values) {
    changes[value.start] += value.bytes;
    changes[value.end + 1] -= value.bytes;
  }
  let level = 0;
  return changes.slice(0, Math.max(plan.memory.steps, 1)).map((change) => (level += change));
}

// --- text ------------------------------------------------------------------------------------------------------------

function significant(number) {
  return String(Number(number.toPrecision(3)));
}

/** Formats a count like the text of a plan: `11.4 MB`. */
function si(number, unit) {
  const prefixes = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const rounded = Number(number.toPrecision(3)); // 999,999 B are 1 MB
  for (const [size, prefix] of prefixes) if (rounded >= size) return `${significant(rounded / size)} ${prefix}${unit}`;
  return unit ? `${significant(number)} ${unit}` : significant(number);
}

function clock(seconds) {
  for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["us", 1e-6]]) {
    if (seconds >= size) return `${significant(seconds / size)} ${unit}`;
  }
  return `${significant(seconds / 1e-9)} ns`;
}

const figure = (number, unit) => (unit === "s" ? clock(number) : unit ? si(number, unit) : String(number));
const bytesOrNothing = (number) => (number ? si(number, "B") : "");
const counted = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
const place = (line) => (line && line.number ? `${line.file}:${line.number}` : "the results");
const withoutNumbers = (name) => name.replace(/_\d+\b/g, "").replace(/\d+/g, "*");

// --- elements --------------------------------------------------------------------------------------------------------

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const h = (tag, attributes, ...children) => build(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) =>
  build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const byId = (id) => document.getElementById(id);

/** A button that arrows reach; `key` finds it again after the page is drawn anew. */
function item(key, attributes, ...children) {
  const own = { "data-key": key, type: "button", ...attributes, class: `item ${attributes.class || ""}` };
  return h("button", own, ...children);
}

function table(heads, rows) {
  const numeric = heads.map((head) => head.startsWith(">"));
  const cell = (tag) => (content, i) => h(tag, { class: numeric[i] ? "number" : i === 0 ? "name" : null }, content);
  const shown = rows.slice(0, MOST_ROWS).map((row) => h("tr", { class: row.class }, row.map(cell("td"))));
  const rest = rows.length - shown.length;
  return h("table", {}, h("thead", {}, h("tr", {}, heads.map((head) => head.replace(">", "")).map(cell("th")))),
    h("tbody", {}, shown, rest > 0 && h("tr", {}, h("td", { colspan: heads.length, class: "quiet" }, `and ${rest} more`))));
}

function lineLink(plan, index) {
  const line = plan.lines[index];
  if (!line || !line.number) return h("span", { class: "quiet" }, "the results");
  const open = () => select({ kind: "line", index });
  return item(`link-${index}`, { class: "link mono", onclick: open, title: `${place(line)}  ${line.text}` }, place(line).split("/").pop());
}

function typeLabel(plan, layout) {
  return layout < 0 ? "" : h("code", { "data-layout": layout, tabindex: 0 }, plan.layouts[layout].text);
}
