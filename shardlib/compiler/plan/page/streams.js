// The panel of the simulated streams, on a canvas, and their download for Perfetto.

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
    h("span", {}, h("i", { class: "swatch", style: "background:var(--exposed)" }),
      `exposed communication: ${clock(plan.clock.exposed)} of ${clock(plan.clock.seconds)}`));
  const canvas = h("canvas", { id: "streams", height: 40 + 30 * usedStreams(plan).length });
  panel.replaceChildren(tools, canvas, h("h2", {}, "Messages that nothing hides"), exposedTable(plan), ...busyTable(plan));
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
    canvas.title = over ? eventText(plan, over) : "";
  });
}

function eventText(plan, event) {
  const waits = event.exposed ? `; calls wait ${clock(event.exposed / 1e6)} for it` : "";
  return `${event.name}: ${clock(event.duration / 1e6)}${waits}\n${place(plan.lines[event.line])}`;
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
    [h("span", { class: "mono" }, group.name), String(group.times), clock(group.exposed / 1e6),
      clock(group.duration / 1e6), lineLink(plan, group.line)]);
  if (!rows.length) return h("div", { class: "empty" }, "all communication is hidden");
  return table(["message", ">times", ">calls wait", ">it takes", "line"], rows);
}

function busyTable(plan) {
  const rows = usedStreams(plan).map(({ name, i }) => {
    const busy = plan.events.filter((event) => event.stream === i).reduce((sum, event) => sum + event.duration, 0) / 1e6;
    return [name, clock(busy), `${significant((100 * busy) / plan.clock.seconds)} %`];
  });
  return [h("h2", {}, "Streams"), table(["stream", ">busy", ">of the step"], rows)];
}

/** The events in the form that Perfetto opens, like `Simulated.to_perfetto`. */
function traceOf(plan) {
  const events = [{ ph: "M", pid: 1, name: "process_name", args: { name: plan.clock.title } }];
  plan.clock.streams.forEach((name, i) => events.push({ ph: "M", pid: 1, tid: i + 1, name: "thread_name", args: { name } }));
  for (const event of plan.events) {
    const at = { ts: event.start, dur: event.duration, args: { line: place(plan.lines[event.line]) } };
    events.push({ ph: "X", pid: 1, tid: event.stream + 1, name: event.name, ...at });
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
