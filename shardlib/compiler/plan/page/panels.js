// The panels of layouts, memory and several plans: each function draws one panel anew.

// --- layouts ---------------------------------------------------------------------------------------------------------

function drawLayouts(panel, plan) {
  const rows = (kind) => plan[kind + "s"].map((value) => {
    const open = () => select({ kind, index: value.index });
    const label = item(`${kind}-${value.index}`, { class: "mono", "data-layout": value.layout, onclick: open }, value.name);
    const times = value.times > 1 ? h("span", { class: "times" }, `x ${value.times}`) : "";
    const small = value.layout < 0 ? "" : picture(plan.layouts[value.layout], 84, 34, false);
    const row = [[label, times], value.layout < 0 ? value.type : typeLabel(plan, value.layout), value.how, bytesOrNothing(value.bytes), small];
    row.class = isSelected(kind, value.index) ? "chosen" : null;
    return row;
  });
  const heads = ["name", "layout", "", ">per device", "shards"];
  const section = (title, kind) => [h("h2", {}, title), table(heads, rows(kind))];
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

/** One hue for a row of shards, from light to dark along it. */
function shardColor(row, column, columns) {
  return `hsl(${(208 + 67 * row) % 360} 52% ${74 - (38 * (column % columns)) / Math.max(columns - 1, 1)}%)`;
}

function picture(layout, width, height, labels) {
  const dims = drawnDims(layout);
  const [rows, columns] = dims.length > 1 ? dims : [null, dims[0]];
  const [left, top] = labels ? [8, 18] : [0, 0];
  const cells = segments(rows, height).flatMap((row) => segments(columns, width).map((column) => {
    const who = [rows && holderText(rows, row.shard), columns && holderText(columns, column.shard)].filter(Boolean).join("\n");
    return s("rect", { class: "cell", x: left + column.from, y: top + row.from, width: Math.max(column.to - column.from, 0.5),
      height: Math.max(row.to - row.from, 0.5), fill: shardColor(row.shard, column.shard, rows ? columns.shards.length : 8) },
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
    h("div", { class: "tools" }, peak, h("span", { class: "quiet" },
      "bytes in use on the fullest device while each step runs; click the curve for another step")),
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
