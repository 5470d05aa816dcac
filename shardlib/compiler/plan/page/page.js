// The page of one or several plans. `state` is all that a click can change, and one function per panel draws it:
// `update` changes the state and draws everything again. The files stand in the page in the order elements.js,
// panels.js, streams.js, page.js. Nothing is loaded or sent.

const PHASES = ["forward", "backward", "optimizer"];
const MOST_CHIPS = 6; // collectives that a source line shows before it is unfolded
const MOST_ROWS = 300; // rows of a table
const PLANS = DATA.plans.map(readPlan);

const state = {
  plan: DATA.diff ? PLANS.length - 1 : 0,
  panel: DATA.diff ? "changes" : PLANS.length > 1 ? "meshes" : "program",
  show: "main", // "main", "all" or "collectives"
  phases: new Set(PHASES),
  open: new Set(), // keys of unfolded groups of the program, and of source lines
  selected: null, // {kind: "row" | "message" | "line" | "input" | "output", index}
  step: null, // the step whose memory is listed; null: the peak
  window: [0, 1], // the shown part of the simulated time
};

const PANELS = [
  { name: "changes", title: "Changes", draw: drawChanges, has: () => DATA.diff },
  { name: "meshes", title: "Plans", draw: drawPlans, has: () => PLANS.length > 1 },
  { name: "program", title: "Program", draw: drawProgram, has: () => true },
  { name: "layouts", title: "Layouts", draw: drawLayouts, has: () => true },
  { name: "memory", title: "Memory", draw: drawMemory, has: () => true, of: (plan) => plan.memory },
  { name: "time", title: "Time", draw: drawTime, has: () => true, of: (plan) => plan.clock },
];

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

/** Small programs are unfolded from the start, others to their phases. */
function firstOpen(plan) {
  const rows = plan.program.length <= 80 ? plan.program : plan.top;
  return new Set(rows.map((row) => `row-${row.index}`));
}

function choosePlan(index) {
  update({ plan: index, selected: null, step: null, open: firstOpen(PLANS[index]), window: [0, 1] });
}

// --- header ----------------------------------------------------------------------------------------------------------

function planLabel(index) {
  const side = DATA.diff ? ["before: ", "after: "][index] : "";
  return `${side}${PLANS[index].heading}`;
}

/** `Memory of stage 1` in a pipeline, whose panels of time and memory show one stage. */
function tabTitle({ title, of }, plan) {
  const stage = of?.(plan)?.stage ?? null;
  return stage === null ? title : `${title} of stage ${stage}`;
}

function drawHeader() {
  const plan = current();
  byId("heading").textContent = PLANS.length > 1 ? plan.name : plan.heading;
  const plans = byId("plans");
  plans.hidden = PLANS.length < 2;
  plans.replaceChildren(...PLANS.map((_, i) => h("option", { value: i, selected: i === state.plan }, planLabel(i))));
  plans.value = state.plan;
  byId("totals").replaceChildren(...plan.totals.map(([name, number, unit, where]) =>
    h("div", {}, h("dt", {}, where ? `${name} (${where})` : name), h("dd", {}, figure(number, unit)))));
  byId("tabs").replaceChildren(...PANELS.filter((panel) => panel.has()).map((panel) =>
    item(`tab-${panel.name}`, { role: "tab", "aria-selected": String(panel.name === state.panel),
      onclick: () => update({ panel: panel.name }) }, tabTitle(panel, plan))));
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
    if (row.children.length && isOpen(row)) row.children.forEach((child) => add(child, depth + 1));
  };
  plan.top.forEach((row) => add(row, 0));
  const head = h("div", { class: "head" }, h("span", {}, "per device, in order"), h("span", {}, "result"),
    h("span", { class: "number" }, "sent"), h("span", { class: "number" }, "FLOPs"));
  const empty = rows.length === 0 && h("div", { class: "empty" }, "nothing is left of the program by these filters");
  panel.replaceChildren(programTools(plan), h("div", { class: "tree", role: "tree" }, head, rows, empty));
}

const isOpen = (row) => state.open.has(`row-${row.index}`);

function programTools(plan) {
  const modes = [["main", "main calls"], ["all", "every call"], ["collectives", "collectives only"]];
  const mode = ([name, label]) => h("label", {}, h("input", { type: "radio", name: "show", value: name, checked: state.show === name,
    "data-key": `show-${name}`, onchange: () => update({ show: name }) }), label);
  const phase = (name) => h("label", {}, h("input", { type: "checkbox", value: name, checked: state.phases.has(name),
    "data-key": `phase-${name}`, onchange: () => toggle(state.phases, name) }), name);
  const unfold = () => update({ open: new Set(plan.program.map((row) => `row-${row.index}`)) });
  return h("div", { class: "tools" }, h("span", {}, modes.map(mode)), h("span", {}, PHASES.map(phase)),
    item("unfold", { class: "plain", onclick: unfold }, "Unfold all"),
    item("shut", { class: "plain", onclick: () => update({ open: new Set() }) }, "Fold all"));
}

function programRow(plan, row, depth) {
  const isGroup = row.kind === "group";
  const kind = row.message >= 0 ? "message" : "row";
  const index = row.message >= 0 ? row.message : row.index;
  const name = row.last && row.last !== row.text ? `${row.text} ... ${row.last}` : row.text;
  const twist = h("span", { class: "twist" }, isGroup ? (isOpen(row) ? "▾" : "▸") : "");
  const times = row.times > 1 ? h("span", { class: "times" }, `x ${row.times}`) : null;
  const count = isGroup && row.all.messages ? h("span", { class: "quiet" }, `  ${counted(row.all.messages, "collective")}`) : null;
  const open = () => (isGroup ? toggle(state.open, `row-${row.index}`) : select({ kind, index }));
  return item(isGroup ? `row-${row.index}` : `${kind}-${index}`, {
    class: `node mono ${row.kind} ${!isGroup && isSelected(kind, index) ? "chosen" : ""}`, role: "treeitem",
    "aria-expanded": isGroup ? String(isOpen(row)) : null, "aria-level": depth + 1, style: `padding-left:${4 + 14 * depth}px`, onclick: open },
    h("span", { class: "name", title: name }, twist, name, times, count),
    h("span", { class: "type", "data-layout": row.layout >= 0 ? row.layout : null }, row.layout < 0 ? "" : plan.layouts[row.layout].text),
    h("span", { class: "number" }, bytesOrNothing(row.all.bytes)),
    h("span", { class: "number" }, row.all.flops ? si(row.all.flops, "FLOP") : ""));
}

// --- details ---------------------------------------------------------------------------------------------------------

function facts(entries) {
  const kept = entries.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return h("dl", { class: "facts" }, kept.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

function drawDetails(details, plan) {
  const { kind, index } = state.selected || {};
  details.hidden = !kind && state.panel !== "program";
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
  const chain = message.explain.split("\n").filter((text) => !/^(\S|  (at|from|to|because) )/.test(text));
  return [h("h2", { class: "mono" }, `${message.kind}[${message.axes}] of ${message.value}`),
    facts([["because", message.reason], ["sends", `${si(message.bytes, "B")} per device${times}`],
      ["takes", duration(message)],
      ["from", typeLabel(plan, message.before)], ["to", typeLabel(plan, message.after)],
      ["at", [message.phase, " of ", lineLink(plan, message.line)]],
      ["in one message with", message.together > 1 ? counted(message.together - 1, "other") : ""],
      ["form", message.form], ["backend", message.backend]]),
    h("h3", {}, "Reasons, back to the annotations"),
    h("div", { class: "chain mono" }, chain.map((text) => h("div", { style: `margin-left:${text.search(/\S/) * 7 - 14}px` }, text.trim()))),
    ...alternatives(plan, message)];
}

function duration({ seconds, exposed }) {
  if (seconds === null) return "";
  return `${clock(seconds)} simulated${exposed === null ? "" : `; calls wait ${clock(exposed)} for it`}`;
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
      ["FLOPs", row.flops ? `${si(row.flops, "FLOP")} each` : ""], ["line", lineLink(plan, row.line)],
      ["code", h("code", {}, plan.lines[row.line]?.text || "")]]),
    row.layout >= 0 && holders(plan.layouts[row.layout])].filter(Boolean);
}

function repeatedWork(work) {
  const op = `${work.op}${work.backward ? ", backward" : ""}`;
  return `${op}: ${si(work.flops, "FLOP")}, ${si(work.bytes, "B")} of results, alike on ${work.copies} devices along ${work.axes}`;
}

function callLink(plan, row) {
  const open = () => select({ kind: "row", index: row.index });
  return h("div", {}, item(`row-${row.index}`, { class: "link mono", onclick: open }, row.text), " ", typeLabel(plan, row.layout));
}

function lineDetails(plan, index) {
  const line = plan.lines[index];
  const heat = plan.heat[index];
  const calls = heat.calls.map((i) => plan.program[i]);
  const work = plan.redundant.filter((entry) => entry.line === index);
  return [h("h2", { class: "mono" }, place(line)), h("code", {}, line.text),
    facts([["sends", bytesOrNothing(heat.bytes)], ["FLOPs", heat.flops ? si(heat.flops, "FLOP") : ""],
      ["repeated work", work.map((entry) => h("div", {}, repeatedWork(entry)))]]),
    heat.messages.length > 0 && h("h3", {}, "Collectives"),
    h("div", { class: "chips", style: "padding-left:0" }, heat.messages.map((i) => chip(plan.messages[i]))),
    calls.length > 0 && h("h3", {}, "Calls"), ...calls.map((row) => callLink(plan, row))].filter(Boolean);
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
  const lines = plan.lines.filter((line) => line.number).map((line) =>
    ({ text: `${place(line)}  ${line.text}`, kind: "line", selected: { kind: "line", index: line.index } }));
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
choosePlan(state.plan);
