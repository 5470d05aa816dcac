// The page of one or several plans. `DATA` is what plan_data.py wrote, `state` is all that a click can change, and one
// function per panel draws it: `update` changes the state and draws everything again. Nothing is loaded or sent.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const PHASES = ["forward", "backward", "optimizer"];
const MOST_CHIPS = 6; // collectives that a source line shows before it is unfolded
const MOST_ROWS = 300; // rows of a table
const PLANS = DATA.plans.map(readPlan);

const state = {
  plan: DATA.diff ? PLANS.length - 1 : 0,
  panel: DATA.diff ? "changes" : PLANS.length > 1 ? "meshes" : "program",
  show: "main", // "main", "all" or "collectives"
  phases: new Set(PHASES),
  open: new Set(), // unfolded groups of the program, and source lines, by key
  selected: null, // {kind: "row" | "message" | "line" | "input" | "output", index}
  step: null, // the step whose memory is listed; null: the peak
  window: [0, 1], // the shown part of the simulated time
};

const PANELS = [
  { name: "changes", title: "Changes", draw: drawChanges, has: () => DATA.diff },
  { name: "meshes", title: "Plans", draw: drawPlans, has: () => PLANS.length > 1 },
  { name: "program", title: "Program", draw: drawProgram, has: () => true },
  { name: "layouts", title: "Layouts", draw: drawLayouts, has: () => true },
  { name: "memory", title: "Memory", draw: drawMemory, has: () => true },
  { name: "time", title: "Time", draw: drawTime, has: () => true },
];

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
  for (const [size, prefix] of prefixes) if (number >= size) return `${significant(number / size)} ${prefix}${unit}`;
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
  return item(`link-${index}`, { class: "link mono", onclick: open, title: line.text }, place(line));
}

function typeLabel(plan, layout) {
  return layout < 0 ? "" : h("code", { "data-layout": layout, tabindex: 0 }, plan.layouts[layout].text);
}

// --- state -----------------------------------------------------------------------------------------------------------

const current = () => PLANS[state.plan];
const isSelected = (kind, index) => state.selected && state.selected.kind === kind && state.selected.index === index;

function update(change) {
  Object.assign(state, change);
  const focused = document.activeElement && document.activeElement.closest("[data-key]");
  const list = focused && focused.closest("[data-list]");
  draw();
  if (!focused || document.contains(focused)) return;
  const again = (list || document).querySelector(`[data-key="${CSS.escape(focused.dataset.key)}"]`);
  if (again) again.focus({ preventScroll: true });
}

function draw() {
  byId("hover").hidden = true;
  drawHeader();
  drawSource();
  PANELS.find((panel) => panel.name === state.panel).draw(byId("panel"), current());
  drawDetails(byId("details"), current());
}

function toggle(set, key) {
  if (!set.delete(key)) set.add(key);
  update({});
}

/** Selects something, unfolds what hides it, and scrolls to it. */
function select(selected) {
  const plan = current();
  if (selected.kind === "message") openAbove(plan, plan.messages[selected.index].row);
  if (selected.kind === "row") openAbove(plan, selected.index);
  update({ selected });
  const line = selectedLine(plan);
  const keys = [line >= 0 && `line-${line}`, selected.kind !== "line" && `${selected.kind}-${selected.index}`];
  for (const key of keys.filter(Boolean)) {
    for (const node of document.querySelectorAll(`[data-key="${key}"]`)) node.scrollIntoView({ block: "nearest" });
  }
}

function openAbove(plan, index) {
  for (let row = plan.program[index]; row.parent >= 0; row = plan.program[row.parent]) state.open.add(`row-${row.parent}`);
}

function selectedLine(plan) {
  const { kind, index } = state.selected || {};
  return { line: () => index, message: () => plan.messages[index].line, row: () => plan.program[index].line }[kind]?.() ?? -1;
}

function choosePlan(index) {
  update({ plan: index, selected: null, step: null, open: new Set(), window: [0, 1] });
}

// --- header ----------------------------------------------------------------------------------------------------------

function planLabel(index) {
  const side = DATA.diff ? ["before: ", "after: "][index] : "";
  return `${side}${PLANS[index].heading}`;
}

function drawHeader() {
  const plan = current();
  byId("heading").textContent = PLANS.length > 1 ? plan.name : plan.heading;
  const plans = byId("plans");
  plans.hidden = PLANS.length < 2;
  plans.replaceChildren(...PLANS.map((_, i) => h("option", { value: i, selected: i === state.plan }, planLabel(i))));
  plans.value = state.plan;
  byId("totals").replaceChildren(...plan.totals.map(([name, number, unit]) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, figure(number, unit)))));
  byId("tabs").replaceChildren(...PANELS.filter((panel) => panel.has()).map((panel) =>
    item(`tab-${panel.name}`, { role: "tab", "aria-selected": String(panel.name === state.panel),
      onclick: () => update({ panel: panel.name }) }, panel.title)));
}

// --- source ----------------------------------------------------------------------------------------------------------

function drawSource() {
  const plan = current();
  const most = { bytes: 0, redundant: 0 };
  for (const heat of plan.heat) for (const key of Object.keys(most)) most[key] = Math.max(most[key], heat[key]);
  const legend = h("div", { class: "legend" },
    h("span", {}, h("i", { class: "swatch", style: "background:var(--bytes)" }), "bytes sent by the line"),
    h("span", {}, h("i", { class: "swatch", style: "background:var(--redundant)" }), "FLOPs that devices repeat"));
  const numbers = new Map(plan.lines.map((line) => [`${line.file}:${line.number}`, line.index]));
  const files = plan.files.map((file) => sourceFile(plan, file, numbers, most));
  const outside = plan.lines.find((line) => !line.number && plan.heat[line.index].messages.length);
  const rest = outside ? [h("div", { class: "file" }, "the results"), sourceChips(plan, outside.index)] : [];
  byId("source").replaceChildren(legend, ...files, ...rest);
}

function sourceFile(plan, file, numbers, most) {
  const rows = [];
  let end = 0;
  for (const [first, texts] of file.stretches) {
    if (end && first > end) rows.push(h("div", { class: "gap" }, `lines ${end} to ${first - 1}`));
    texts.forEach((text, i) => {
      const index = numbers.get(`${file.file}:${first + i}`) ?? -1;
      rows.push(sourceLine(plan, index, first + i, text, most));
      if (index >= 0 && plan.heat[index].messages.length) rows.push(sourceChips(plan, index));
    });
    end = first + texts.length;
  }
  return h("section", {}, h("div", { class: "file mono" }, file.file), rows);
}

function sourceLine(plan, index, number, text, most) {
  const heat = plan.heat[index];
  const bar = (key, unit) => h("span", { class: "heat", title: heat && heat[key] ? si(heat[key], unit) : null },
    heat && heat[key] > 0 && h("i", { style: `width:${2 + (28 * heat[key]) / most[key]}px;background:var(--${key})` }));
  const parts = [bar("bytes", "B"), bar("redundant", "FLOP"), h("span", { class: "at mono" }, number), h("span", { class: "code" }, text || " ")];
  if (!heat) return h("div", { class: "row silent" }, parts);
  const mark = index === selectedLine(plan) ? "chosen" : "";
  return item(`line-${index}`, { class: `row ${mark}`, onclick: () => select({ kind: "line", index }) }, parts);
}

function sourceChips(plan, index) {
  const key = `chips-${index}`;
  const messages = plan.heat[index].messages.map((i) => plan.messages[i]).filter((message) => state.phases.has(message.phase));
  messages.sort((a, b) => b.bytes * b.total - a.bytes * a.total);
  const shown = state.open.has(key) ? messages : messages.slice(0, MOST_CHIPS);
  const rest = messages.length - MOST_CHIPS;
  const more = state.open.has(key) ? "fewer" : `${rest} more`;
  return h("div", { class: "chips" }, shown.map((message) => chip(message)),
    rest > 0 && item(key, { class: "quiet", onclick: () => toggle(state.open, key) }, more));
}

function chip(message) {
  const mark = isSelected("message", message.index) ? "chosen" : "";
  const times = message.total > 1 ? h("span", { class: "times" }, `x ${message.total}`) : null;
  return item(`message-${message.index}`, { class: `chip mono ${message.phase} ${mark}`, title: `${message.phase}: ${message.reason}`,
    onclick: () => select({ kind: "message", index: message.index }) },
    `${message.kind}[${message.axes}] ${message.value}  ${si(message.bytes * message.total, "B")}`, times);
}

// --- program ---------------------------------------------------------------------------------------------------------

function isShown(row) {
  if (row.kind === "group") return row.children.some(isShown);
  if (!state.phases.has(row.phase)) return false;
  const sends = row.kind === "message" || row.kind === "copy";
  return state.show === "all" || sends || (state.show === "main" && row.kind !== "small");
}

function drawProgram(panel, plan) {
  const rows = [];
  const add = (row, depth) => {
    if (!isShown(row)) return;
    rows.push(programRow(plan, row, depth));
    if (row.children.length && isOpen(plan, row)) row.children.forEach((child) => add(child, depth + 1));
  };
  plan.top.forEach((row) => add(row, 0));
  const head = h("div", { class: "head" }, h("span", {}, "per device, in order"), h("span", {}, "result"),
    h("span", { class: "number" }, "sent"), h("span", { class: "number" }, "work"));
  const empty = rows.length === 0 && h("div", { class: "empty" }, "nothing is left of the program by these filters");
  panel.replaceChildren(programTools(plan), h("div", { class: "tree", role: "tree" }, head, rows, empty));
}

/** Small programs are unfolded from the start. */
function isOpen(plan, row) {
  const first = plan.program.length <= 80 || row.parent < 0;
  return first !== state.open.has(`${first ? "shut" : "row"}-${row.index}`) || state.open.has(`row-${row.index}`);
}

function fold(plan, row) {
  const first = plan.program.length <= 80 || row.parent < 0;
  const open = isOpen(plan, row);
  state.open.delete(`row-${row.index}`);
  state.open.delete(`shut-${row.index}`);
  if (first === open) state.open.add(`${open ? "shut" : "row"}-${row.index}`);
  update({});
}

function programTools(plan) {
  const modes = [["main", "main calls"], ["all", "every call"], ["collectives", "collectives only"]];
  const mode = ([name, label]) => h("label", {}, h("input", { type: "radio", name: "show", value: name, checked: state.show === name,
    "data-key": `show-${name}`, onchange: () => update({ show: name }) }), label);
  const phase = (name) => h("label", {}, h("input", { type: "checkbox", value: name, checked: state.phases.has(name),
    "data-key": `phase-${name}`, onchange: () => toggle(state.phases, name) }), name);
  const unfold = () => {
    plan.program.forEach((row) => row.kind === "group" && state.open.add(`row-${row.index}`));
    update({});
  };
  const shut = () => {
    plan.program.forEach((row) => state.open.delete(`row-${row.index}`) || state.open.add(`shut-${row.index}`));
    update({});
  };
  return h("div", { class: "tools" }, h("span", {}, modes.map(mode)), h("span", {}, PHASES.map(phase)),
    item("unfold", { class: "plain", onclick: unfold }, "Unfold all"), item("shut", { class: "plain", onclick: shut }, "Fold all"));
}

function programRow(plan, row, depth) {
  const isGroup = row.kind === "group";
  const kind = row.message >= 0 ? "message" : "row";
  const index = row.message >= 0 ? row.message : row.index;
  const name = row.last && row.last !== row.text ? `${row.text} ... ${row.last}` : row.text;
  const twist = h("span", { class: "twist" }, isGroup ? (isOpen(plan, row) ? "▾" : "▸") : "");
  const times = row.times > 1 ? h("span", { class: "times" }, `x ${row.times}`) : null;
  const count = isGroup && row.all.messages ? h("span", { class: "quiet" }, `  ${row.all.messages} collectives`) : null;
  const open = () => (isGroup ? fold(plan, row) : select({ kind, index }));
  return item(isGroup ? `row-${row.index}` : `${kind}-${index}`, {
    class: `node mono ${row.kind} ${!isGroup && isSelected(kind, index) ? "chosen" : ""}`, role: "treeitem",
    "aria-expanded": isGroup ? String(isOpen(plan, row)) : null, "aria-level": depth + 1, style: `padding-left:${4 + 14 * depth}px`, onclick: open },
    h("span", { class: "name", title: name }, twist, name, times, count),
    h("span", { class: "type", "data-layout": row.layout >= 0 ? row.layout : null }, row.layout < 0 ? "" : plan.layouts[row.layout].text),
    h("span", { class: "number" }, bytesOrNothing(row.all.bytes)),
    h("span", { class: "number" }, row.all.flops ? si(row.all.flops, "FLOP") : ""));
}

// --- layouts ---------------------------------------------------------------------------------------------------------

function drawLayouts(panel, plan) {
  const rows = (kind) => plan[kind + "s"].map((value) => {
    const label = item(`${kind}-${value.index}`, { class: "mono", "data-layout": value.layout, onclick: () => select({ kind, index: value.index }) }, value.name);
    const times = value.times > 1 ? h("span", { class: "times" }, `x ${value.times}`) : "";
    const small = value.layout < 0 ? "" : picture(plan.layouts[value.layout], 84, 34, false);
    const row = [[label, times], value.layout < 0 ? value.type : typeLabel(plan, value.layout), value.how, bytesOrNothing(value.bytes), small];
    row.class = isSelected(kind, value.index) ? "chosen" : null;
    return row;
  });
  const heads = ["name", "layout", "chosen by", ">bytes per device", "shards"];
  const label = (how) => (how === "annotated" ? "an annotation" : "the compiler");
  const section = (title, kind) => [h("h2", {}, title), table(heads, rows(kind).map((row) => ((row[2] = label(row[2])), row)))];
  panel.replaceChildren(...section("Inputs", "input"), ...section("Outputs", "output"));
}

/** The one or two dims that a picture shows: sharded ones first, then the last ones. */
function drawnDims(layout) {
  const order = layout.dims.map((dim, i) => ({ dim, i })).sort((a, b) => (b.dim.count > 1) - (a.dim.count > 1) || b.i - a.i);
  return order.slice(0, 2).sort((a, b) => a.i - b.i).map((entry) => entry.dim);
}

/** Stretches of a dim along `length` pixels, with their shard; dims of many shards show the first and the last. */
function segments(dim, length) {
  if (!dim) return [{ from: 0, to: length, shard: 0 }];
  const slots = dim.shards.length + 1;
  if (dim.count > dim.shards.length) {
    const at = (i) => (i === dim.shards.length - 1 ? i + 1 : i);
    return dim.shards.map((_, i) => ({ from: (at(i) * length) / slots, to: ((at(i) + 1) * length) / slots, shard: i }));
  }
  const scale = length / Math.max(dim.size, 1);
  return dim.shards.flatMap((shard, i) => shard.runs.map(([from, to]) => ({ from: from * scale, to: to * scale, shard: i })));
}

const dimLabel = (dim) => (dim.name ? `${dim.name}=${dim.size}` : String(dim.size));
const runsText = (runs) => (runs.length ? runs.slice(0, 4).map(([a, b]) => `${a}:${b}`).join(" ") + (runs.length > 4 ? " ..." : "") : "nothing");

function holderText(dim, i) {
  const shard = dim.shards[i];
  return `${shard.devices || "every device"} has ${dim.name || "elements"} ${runsText(shard.runs)}`;
}

function picture(layout, width, height, labels) {
  const dims = drawnDims(layout);
  const [rows, columns] = dims.length > 1 ? dims : [null, dims[0]];
  const [left, top] = labels ? [8, 18] : [0, 0];
  const cells = segments(rows, height).flatMap((row) => segments(columns, width).map((column) => {
    const number = row.shard * (columns ? columns.shards.length : 1) + column.shard;
    const who = [rows && holderText(rows, row.shard), columns && holderText(columns, column.shard)].filter(Boolean).join("\n");
    return s("rect", { class: "cell", x: left + column.from, y: top + row.from, width: Math.max(column.to - column.from, 0.5),
      height: Math.max(row.to - row.from, 0.5), fill: `hsl(${(205 + 47 * number) % 360} 55% ${62 - 9 * (Math.floor(number / 8) % 3)}%)` },
      s("title", {}, who));
  }));
  const words = labels ? [columns && s("text", { class: "axis", x: left, y: 12 }, `${dimLabel(columns)} across`),
    rows && s("text", { class: "axis", x: left, y: top + height + 13 }, `${dimLabel(rows)} down`)] : [];
  return s("svg", { width: width + left, height: height + top + (labels ? 18 : 0), role: "img", "aria-label": layout.text }, cells, words);
}

function holderRows(layout) {
  const rows = layout.dims.filter((dim) => dim.count > 1).flatMap((dim) => {
    const known = dim.shards.map((shard, i) => h("div", {}, holderText(dim, i)));
    if (dim.count > dim.shards.length) known.splice(-1, 0, h("div", { class: "quiet" }, `${dim.count - dim.shards.length} more shards`));
    return [h("h3", {}, `${dimLabel(dim)} in ${dim.count} shards`), known];
  });
  const whole = rows.length === 0 && h("div", {}, "every device has all of it");
  const copies = layout.copies.length > 0 && h("div", { class: "quiet" }, `the same on ${layout.alike} devices along ${layout.copies.join(", ")}`);
  const sums = layout.sums.map((sum) => h("div", { class: "quiet" }, `a partial sum (${sum}): every device has an addend`));
  return h("div", { class: "mono" }, whole, rows, copies, sums);
}

// --- memory ----------------------------------------------------------------------------------------------------------

function drawMemory(panel, plan) {
  const step = state.step ?? plan.peak;
  const at = step === plan.peak ? "the peak" : `step ${step} of ${plan.memory.steps}`;
  const slider = h("input", { type: "range", min: 0, max: Math.max(plan.memory.steps - 1, 0), value: step, "data-key": "step",
    "aria-label": "step of the program", oninput: (event) => update({ step: Number(event.target.value) }) });
  const peak = item("peak", { class: "plain", onclick: () => update({ step: plan.peak }) }, `Peak: ${si(plan.levels[plan.peak], "B")}`);
  const rows = aliveAt(plan, step).map((group) => [
    [h("span", { class: "mono" }, group.name), group.times > 1 ? h("span", { class: "times" }, `x ${group.times}`) : ""],
    si(group.bytes, "B"), [group.maker ? `${group.maker} at ` : "", group.maker ? lineLink(plan, group.line) : ""], group.why]);
  panel.replaceChildren(
    h("div", { class: "tools" }, peak, h("span", { class: "quiet" }, "bytes in use on the fullest device while each step runs; click the curve for another step")),
    memoryCurve(plan, step), slider,
    h("h2", {}, `${si(plan.levels[step], "B")} at ${at}`), table(["value", ">bytes", "made by", "why it is kept"], rows));
}

function memoryCurve(plan, step) {
  const [width, height] = [800, 220];
  const most = Math.max(plan.levels[plan.peak], 1);
  const x = (i) => (i * width) / plan.levels.length;
  const y = (level) => height - (level / most) * (height - 26);
  const every = Math.max(1, Math.floor(plan.levels.length / width));
  let path = `M0 ${height}`;
  for (let i = 0; i < plan.levels.length; i += every) {
    const level = y(Math.max(...plan.levels.slice(i, i + every)));
    path += `L${x(i)} ${level}L${x(Math.min(i + every, plan.levels.length))} ${level}`;
  }
  const bands = plan.memory.phases.map(([start, phase], i) => {
    const end = i + 1 < plan.memory.phases.length ? plan.memory.phases[i + 1][0] : plan.levels.length;
    return s("rect", { class: `band ${phase}`, x: x(start), y: 0, width: x(end) - x(start), height }, s("title", {}, phase));
  });
  const pick = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    update({ step: Math.max(0, Math.min(plan.levels.length - 1, Math.floor(share * plan.levels.length))) });
  };
  return s("svg", { class: "curve", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", onclick: pick, role: "img",
    "aria-label": "bytes in use over the steps of the program" }, bands, s("path", { class: "fill", d: `${path}L${width} ${height}Z` }),
    s("line", { class: "marker", x1: x(step + 0.5), x2: x(step + 0.5), y1: 0, y2: height }));
}

/** Values in use at a step; those that differ by a number alone are one group. */
function aliveAt(plan, step) {
  const groups = new Map();
  for (const value of plan.values) {
    if (step < value.start || step > value.end) continue;
    const name = withoutNumbers(value.name);
    const key = JSON.stringify([name, value.line, value.maker, withoutNumbers(value.why)]);
    const group = groups.get(key) || { ...value, name: value.name, pattern: name, bytes: 0, times: 0 };
    group.bytes += value.bytes;
    group.times += 1;
    if (group.times > 1) group.name = group.pattern;
    groups.set(key, group);
  }
  return [...groups.values()].sort((a, b) => b.bytes - a.bytes);
}

// --- time ------------------------------------------------------------------------------------------------------------

function drawTime(panel, plan) {
  if (!plan.clock) {
    const note = 'Name a machine to see the simulated streams: plan.html(path, machine="h100"), or Mesh(..., machine="h100").';
    panel.replaceChildren(h("div", { class: "empty" }, note));
    return;
  }
  const zoom = (factor) => () => update({ window: zoomed(state.window, factor, 0.5) });
  const tools = h("div", { class: "tools" },
    item("in", { class: "plain", onclick: zoom(0.5) }, "Zoom in"), item("out", { class: "plain", onclick: zoom(2) }, "Zoom out"),
    item("perfetto", { class: "plain", onclick: () => downloadTrace(plan) }, "Download for Perfetto"),
    h("span", {}, h("i", { class: "swatch", style: "background:var(--exposed)" }), `exposed communication: ${clock(plan.clock.exposed)} of ${clock(plan.clock.seconds)}`));
  const canvas = h("canvas", { id: "streams", height: 40 + 30 * usedStreams(plan).length });
  panel.replaceChildren(tools, canvas, h("h2", {}, "Messages that nothing hides"), exposedTable(plan), h("h2", {}, "Summary"), h("pre", {}, plan.clock.text));
  drawStreams(canvas, plan);
  watchStreams(canvas, plan);
}

const usedStreams = (plan) => plan.clock.streams.map((name, i) => ({ name, i })).filter(({ i }) => plan.events.some((event) => event.stream === i));

function zoomed([from, to], factor, center) {
  const middle = from + (to - from) * center;
  const width = Math.min(Math.max((to - from) * factor, 1e-5), 1);
  const start = Math.min(Math.max(middle - width * center, 0), 1 - width);
  return [start, start + width];
}

function drawStreams(canvas, plan) {
  const width = canvas.clientWidth || 700;
  const ratio = window.devicePixelRatio || 1;
  const height = canvas.height;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "11px ui-monospace, monospace";
  const color = (name) => getComputedStyle(document.body).getPropertyValue(`--${name}`);
  const [from, to] = state.window.map((share) => share * plan.clock.seconds * 1e6);
  const x = (moment) => ((moment - from) / (to - from)) * width;
  const rows = new Map(usedStreams(plan).map(({ name, i }, row) => [i, { y: 24 + 30 * row, name }]));
  for (const event of plan.events) {
    const end = event.start + event.duration;
    if (end < from || event.start > to) continue;
    pen.fillStyle = color(event.stream ? "bytes" : "memory");
    pen.fillRect(x(event.start), rows.get(event.stream).y, Math.max(x(end) - x(event.start) - 0.3, 0.4), 14);
    if (!event.exposed) continue;
    pen.fillStyle = color("exposed");
    const left = x(end - event.exposed);
    pen.fillRect(left, rows.get(0)?.y ?? 24, Math.max(x(end) - left, 1), 14);
    pen.fillRect(left, rows.get(event.stream).y + 11, Math.max(x(end) - left, 1), 3);
  }
  pen.fillStyle = color("quiet");
  for (const { y, name } of rows.values()) pen.fillText(name, 2, y - 3);
  const bottom = height - 4;
  [0, 0.25, 0.5, 0.75].forEach((share) => pen.fillText(clock((from + share * (to - from)) / 1e6 || 0), share * width + 2, bottom));
}

function watchStreams(canvas, plan) {
  let drag = null;
  const redraw = () => { canvas.height = 40 + 30 * usedStreams(plan).length; drawStreams(canvas, plan); };
  const share = (event) => (event.clientX - canvas.getBoundingClientRect().left) / canvas.clientWidth;
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    state.window = zoomed(state.window, event.deltaY > 0 ? 1.25 : 0.8, share(event));
    redraw();
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => (drag = { at: share(event), window: state.window }));
  canvas.addEventListener("pointerup", (event) => {
    if (drag && Math.abs(share(event) - drag.at) < 0.004) openEvent(eventAt(canvas, plan, event));
    drag = null;
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag && event.buttons) {
      const [from, to] = drag.window;
      const start = Math.min(Math.max(from - (share(event) - drag.at) * (to - from), 0), 1 - (to - from));
      state.window = [start, start + to - from];
      redraw();
    }
    const over = eventAt(canvas, plan, event);
    canvas.title = over ? `${over.name}: ${clock(over.duration / 1e6)}${over.exposed ? `, exposed ${clock(over.exposed / 1e6)}` : ""}\n${place(plan.lines[over.line])}` : "";
  });
}

function eventAt(canvas, plan, pointer) {
  const box = canvas.getBoundingClientRect();
  const stream = usedStreams(plan)[Math.floor((pointer.clientY - box.top - 14) / 30)];
  const [from, to] = state.window;
  const moment = (from + ((pointer.clientX - box.left) / box.width) * (to - from)) * plan.clock.seconds * 1e6;
  return stream && plan.events.find((event) => event.stream === stream.i && event.start <= moment && moment <= event.start + event.duration);
}

function openEvent(event) {
  if (event && current().lines[event.line]?.number) select({ kind: "line", index: event.line });
}

function exposedTable(plan) {
  const groups = new Map();
  for (const event of plan.events.filter((e) => e.exposed > 0)) {
    const key = `${event.name} ${event.line}`;
    const group = groups.get(key) || { ...event, exposed: 0, duration: 0, times: 0 };
    group.exposed += event.exposed;
    group.duration += event.duration;
    group.times += 1;
    groups.set(key, group);
  }
  const rows = [...groups.values()].sort((a, b) => b.exposed - a.exposed).map((group) =>
    [h("span", { class: "mono" }, group.name), String(group.times), clock(group.exposed / 1e6), clock(group.duration / 1e6), lineLink(plan, group.line)]);
  return rows.length ? table(["message", ">times", ">exposed", ">in all", "line"], rows) : h("div", { class: "empty" }, "all communication is hidden");
}

/** The events in the form that Perfetto opens, like `Simulated.to_perfetto`. */
function traceOf(plan) {
  const events = [{ ph: "M", pid: 1, name: "process_name", args: { name: plan.clock.title } }];
  plan.clock.streams.forEach((name, i) => events.push({ ph: "M", pid: 1, tid: i + 1, name: "thread_name", args: { name } }));
  for (const event of plan.events) {
    events.push({ ph: "X", pid: 1, tid: event.stream + 1, name: event.name, ts: event.start, dur: event.duration, args: { line: place(plan.lines[event.line]) } });
  }
  for (const [moment, bytes] of plan.clock.memory) events.push({ ph: "C", pid: 1, name: "memory", ts: moment, args: { bytes } });
  return { traceEvents: events };
}

function downloadTrace(plan) {
  const file = new Blob([JSON.stringify(traceOf(plan))], { type: "application/json" });
  const link = h("a", { href: URL.createObjectURL(file), download: `${plan.name}.perfetto.json` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// --- several plans ---------------------------------------------------------------------------------------------------

function drawPlans(panel) {
  const names = [...new Map(PLANS.flatMap((plan) => plan.totals.map(([name, , unit]) => [name, unit])))];
  const rows = PLANS.map((plan, i) => {
    const own = new Map(plan.totals.map(([name, number]) => [name, number]));
    const row = [item(`plan-${i}`, { class: "mono", onclick: () => choosePlan(i) }, DATA.diff ? planLabel(i) : plan.mesh),
      ...names.map(([name, unit]) => (own.has(name) ? figure(own.get(name), unit) : ""))];
    row.class = i === state.plan ? "chosen" : null;
    return row;
  });
  const note = "Open a plan to see its program, layouts, memory and time in the other tabs.";
  panel.replaceChildren(h("div", { class: "quiet" }, note), table(["plan", ...names.map(([name]) => `>${name}`)], rows));
}

function change(before, after) {
  if (before === after) return h("span", { class: "quiet" }, "as before");
  if (!before) return "new";
  const percent = 100 * (after / before - 1);
  return h("span", { class: percent > 0 ? "more" : "less" }, `${percent > 0 ? "+" : ""}${significant(percent)} %`);
}

function drawChanges(panel) {
  const diff = DATA.diff;
  const totals = diff.totals.map((t) => [t.figure, figure(t.before, t.unit), figure(t.after, t.unit), change(t.before, t.after)]);
  const layouts = [...diff.inputs, ...diff.outputs].map((row) => row.map((text) => h("code", {}, text || "not there")));
  const lines = diff.lines.flatMap((line) => changedLine(line));
  const same = diff.lines.length === 0 && h("div", { class: "empty" }, "every line sends and computes as before");
  panel.replaceChildren(
    h("h2", {}, "Per device"), table(["figure", ">before", ">after", ">change"], totals),
    h("h2", {}, "Layouts"), layouts.length ? table(["name", "before", "after"], layouts) : h("div", { class: "empty" }, "all layouts are as before"),
    h("h2", {}, "Lines"), h("div", { class: "sides" }, h("div", { class: "quiet" }, "before"), h("div", { class: "quiet" }, "after"), lines), same);
}

function changedLine(line) {
  const open = () => {
    const index = current().lines.findIndex((own) => place(own) === line.line);
    if (index >= 0) select({ kind: "line", index });
  };
  const head = h("div", { class: "wide" }, line.backward ? "backward of " : "",
    item(`changed-${line.line}-${line.backward}`, { class: "link mono", onclick: open }, line.line), h("code", {}, `  ${line.text}`));
  const side = (i) => {
    const rows = line.collectives.filter((moved) => moved.times[i]).map((moved) => {
      const kind = moved.times[1 - i] ? "" : i ? "more" : "less";
      const times = moved.times[i] > 1 ? `${moved.times[i]} times, ` : "";
      return h("div", { class: `mono ${kind}` }, `${moved.kind}[${moved.axes.join(" ")}] ${moved.value}  ${times}${si(moved.bytes[i], "B")}`);
    });
    const work = line.flops[0] !== line.flops[1] && h("div", { class: "quiet" }, si(line.flops[i], "FLOP"));
    return h("div", {}, rows, work, !rows.length && !work && h("span", { class: "quiet" }, "nothing is sent"));
  };
  return [head, side(0), side(1)];
}

// --- details ---------------------------------------------------------------------------------------------------------

function facts(entries) {
  const kept = entries.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return h("dl", { class: "facts" }, kept.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

function drawDetails(details, plan) {
  const { kind, index } = state.selected || {};
  const content = {
    message: () => messageDetails(plan, plan.messages[index]), row: () => rowDetails(plan, plan.program[index]),
    line: () => lineDetails(plan, index), input: () => valueDetails(plan, plan.inputs[index]), output: () => valueDetails(plan, plan.outputs[index]),
  }[kind]?.() ?? overview(plan);
  details.replaceChildren(...content);
}

function overview(plan) {
  const [heads, ...rows] = plan.kinds;
  const kinds = table(heads.map((head) => head || " "), rows);
  return [h("h2", {}, "Collectives"), kinds, ...plan.notes.map((note) => h("div", {}, note)),
    h("p", { class: "quiet" }, "Select a collective, a line or a name to see its reasons here.")];
}

function messageDetails(plan, message) {
  const times = message.total > 1 ? `, ${message.total} times: ${si(message.bytes * message.total, "B")} in all` : "";
  const chain = message.explain.split("\n").slice(1);
  return [h("h2", { class: "mono" }, `${message.kind}[${message.axes}] of ${message.value}`),
    facts([["because", message.reason], ["sends", `${si(message.bytes, "B")} per device${times}`],
      ["takes", message.seconds ? `${clock(message.seconds)} simulated, exposed for ${clock(message.exposed)}` : ""],
      ["from", typeLabel(plan, message.before)], ["to", typeLabel(plan, message.after)], ["line", [message.phase, " ", lineLink(plan, message.line)]],
      ["in one message with", message.together > 1 ? `${message.together - 1} others` : ""], ["form", message.form], ["backend", message.backend]]),
    h("h3", {}, "Reasons, back to the annotations"),
    h("div", { class: "chain mono" }, chain.map((text) => h("div", { style: `margin-left:${text.search(/\S/) * 7 - 14}px` }, text.trim()))),
    ...alternatives(plan, message)];
}

function alternatives(plan, message) {
  const own = plan.alternatives.filter((option) => option.message === message.index);
  const rows = own.map((option, i) => {
    const first = i === 0 || own[i - 1].op !== option.op || own[i - 1].axis !== option.axis;
    const mark = option.chosen ? "winner" : "rejected";
    const cells = [first ? `${option.axis}, in ${option.op}` : "", option.dim, option.chosen ? "chosen" : "rejected",
      clock(option.seconds), si(Math.round(option.bytes), "B"), option.source];
    return cells.map((text, column) => (column ? h("span", { class: mark }, text) : h("code", {}, text)));
  });
  const heads = ["mesh axis", "shards", "", ">estimated", ">sends", "asked for by"];
  const note = "Estimates count all that the decision touches, in all layers that decide alike.";
  return rows.length ? [h("h3", {}, "Alternatives"), table(heads, rows), h("div", { class: "quiet" }, note)] : [];
}

function rowDetails(plan, row) {
  return [h("h2", { class: "mono" }, row.text),
    facts([["result", typeLabel(plan, row.layout)], ["phase", row.phase], ["times", row.total > 1 ? row.total : ""],
      ["work", row.flops ? `${si(row.flops, "FLOP")} each` : ""], ["line", lineLink(plan, row.line)], ["code", h("code", {}, plan.lines[row.line]?.text || "")]]),
    row.layout >= 0 && holders(plan.layouts[row.layout])].filter(Boolean);
}

function lineDetails(plan, index) {
  const line = plan.lines[index];
  const heat = plan.heat[index];
  const calls = heat.calls.map((i) => plan.program[i]);
  const work = plan.redundant.filter((entry) => entry.line === index);
  return [h("h2", { class: "mono" }, place(line)), h("code", {}, line.text),
    facts([["sends", bytesOrNothing(heat.bytes)], ["work", heat.flops ? si(heat.flops, "FLOP") : ""],
      ["repeated work", work.map((entry) => h("div", {}, `${entry.op}${entry.backward ? ", backward" : ""}: ${si(entry.flops, "FLOP")}, ${si(entry.bytes, "B")} of results, alike on ${entry.copies} devices along ${entry.axes}`))]]),
    heat.messages.length > 0 && h("h3", {}, "Collectives"), h("div", { class: "chips", style: "padding-left:0" }, heat.messages.map((i) => chip(plan.messages[i]))),
    calls.length > 0 && h("h3", {}, "Calls"), ...calls.map((row) => h("div", {}, item(`row-${row.index}`, { class: "link mono", onclick: () => select({ kind: "row", index: row.index }) }, row.text), " ", typeLabel(plan, row.layout)))].filter(Boolean);
}

function valueDetails(plan, value) {
  return [h("h2", { class: "mono" }, value.name, value.times > 1 ? h("span", { class: "times" }, `x ${value.times}`) : null),
    facts([["layout", value.layout < 0 ? value.type : typeLabel(plan, value.layout)], ["bytes per device", bytesOrNothing(value.bytes)]]),
    value.layout >= 0 && holders(plan.layouts[value.layout])].filter(Boolean);
}

const holders = (layout) => h("div", { class: "holders" }, picture(layout, 220, 120, true), holderRows(layout));

// --- search ----------------------------------------------------------------------------------------------------------

/** Everything with a name, as {text, kind, open}. */
function searchEntries(plan) {
  const named = (kind, panel) => plan[kind + "s"].map((value) => ({ text: value.name, kind, panel, selected: { kind, index: value.index } }));
  const rows = plan.program.map((row) => ({ text: row.last ? `${row.text} ... ${row.last}` : row.text,
    kind: row.message >= 0 ? "collective" : row.kind === "group" ? "module" : "call", panel: "program", row,
    selected: row.message >= 0 ? { kind: "message", index: row.message } : { kind: "row", index: row.index } }));
  const lines = plan.lines.filter((line) => line.number).map((line) => ({ text: `${place(line)}  ${line.text}`, kind: "line", selected: { kind: "line", index: line.index } }));
  return [...named("input", "layouts"), ...named("output", "layouts"), ...rows, ...lines];
}

/** Finds entries that contain the query; a number in it also matches the star, or the first number, of a repeat. */
function searchPlan(plan, query) {
  plan.entries ||= searchEntries(plan);
  const exact = query.toLowerCase();
  const loose = new RegExp(query.replace(/[.*+?^${}()|[\]\\]/g, "\\$&").replace(/\d+/g, "(\\d+|\\*)"), "i");
  const hits = plan.entries.filter((entry) => loose.test(entry.text));
  const rank = (entry) => (entry.text.toLowerCase().includes(exact) ? 0 : 1);
  return hits.sort((a, b) => rank(a) - rank(b));
}

function drawResults() {
  const query = byId("search").value.trim();
  const results = byId("results");
  results.hidden = !query;
  if (!query) return;
  const hits = searchPlan(current(), query);
  const rows = hits.slice(0, 60).map((entry, i) => item(`hit-${i}`, { onclick: () => openEntry(entry) },
    h("span", { class: "label mono", title: entry.text }, entry.text), h("span", { class: "quiet" }, entry.kind)));
  const count = hits.length > rows.length ? `${rows.length} of ${hits.length} shown` : `${hits.length} found`;
  results.replaceChildren(h("div", { class: "quiet", id: "hits" }, count), ...rows);
}

function openEntry(entry) {
  byId("results").hidden = true;
  if (entry.panel) state.panel = entry.panel;
  if (entry.row) revealRow(entry.row);
  select(entry.selected);
}

/** Widens the filters until they show a row, and unfolds it if it is a group. */
function revealRow(row) {
  if (row.phase) state.phases.add(row.phase);
  if (!isShown(row)) state.show = "all";
  openAbove(current(), row.index);
  if (row.kind === "group") state.open.add(`row-${row.index}`);
}

// --- keys and pointers -----------------------------------------------------------------------------------------------

function moveFocus(step) {
  const focused = document.activeElement;
  const list = focused.id === "search" ? byId("results") : focused.closest("[data-list]") || byId("panel");
  const items = [...list.querySelectorAll(".item")].filter((node) => node.offsetParent !== null);
  const next = items[items.indexOf(focused) + step];
  if (next) next.focus();
  else if (step < 0 && list.id === "results") byId("search").focus();
}

function onKey(event) {
  const inText = event.target.id === "search";
  if (event.key === "/" && !inText) {
    byId("search").select();
    byId("search").focus();
  } else if (event.key === "Escape") {
    byId("results").hidden = true;
    if (state.selected && !inText) update({ selected: null });
  } else if (event.key === "Enter" && inText) {
    byId("results").querySelector(".item")?.click();
  } else if ((event.key === "ArrowDown" || event.key === "ArrowUp") && !["range", "radio"].includes(event.target.type)) {
    moveFocus(event.key === "ArrowDown" ? 1 : -1);
  } else if ((event.key === "ArrowRight" || event.key === "ArrowLeft") && event.target.hasAttribute?.("aria-expanded")) {
    if ((event.target.getAttribute("aria-expanded") === "true") !== (event.key === "ArrowRight")) event.target.click();
  } else return;
  event.preventDefault();
}

function onHover(event) {
  const node = event.target.closest?.("[data-layout]");
  const hover = byId("hover");
  const layout = node && current().layouts[node.dataset.layout];
  hover.hidden = !layout;
  if (!layout) return;
  hover.replaceChildren(h("div", { class: "mono" }, layout.text), picture(layout, 180, 80, true), holderRows(layout));
  const box = node.getBoundingClientRect();
  hover.style.left = `${Math.max(8, Math.min(box.left, window.innerWidth - 430))}px`;
  const below = box.bottom + 6;
  hover.style.top = `${below + hover.offsetHeight < window.innerHeight ? below : Math.max(8, box.top - hover.offsetHeight - 6)}px`;
}

document.addEventListener("keydown", onKey);
document.addEventListener("mouseover", onHover);
document.addEventListener("focusin", onHover);
byId("search").addEventListener("input", drawResults);
byId("plans").addEventListener("change", (event) => choosePlan(Number(event.target.value)));
window.addEventListener("resize", () => state.panel === "time" && update({}));
draw();
