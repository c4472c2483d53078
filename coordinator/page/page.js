"use strict";
// Whatever comes from elsewhere goes into textContent or an attribute of an SVG's geometry, never into markup.
const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const state = { overview: null, chosen: decodeURIComponent(location.hash.slice(1)) || null, seen: "", loading: false, again: false };

// --- forms of values ---
const number = (x) => x === null || x === undefined ? "-" : Number(x.toPrecision(4)).toString();
const grouped = (x) => Math.round(x).toLocaleString("en");
function bytes(x) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (x >= size) return (x / size).toPrecision(3) + " " + unit;
  return Math.round(x) + " B";
}
const seconds = (x) => x === null || x === undefined ? "-" : x < 1 ? (1000 * x).toPrecision(3) + " ms" : x.toFixed(2) + " s";
const percent = (x) => x === null ? "-" : number(100 * x) + " %";
const share = (x) => x === null ? "-" : `${number(x)} of an even share`;
const steps = (x) => x > 1e15 ? "?" : String(x);
const clock = (x) => new Date(1000 * x).toLocaleString();

// --- elements ---
function make(name, text, attributes) {
  const found = document.createElement(name);
  if (text !== undefined && text !== null) found.textContent = text;
  for (const [key, value] of Object.entries(attributes || {})) found.setAttribute(key, value);
  return found;
}
function draw(name, attributes, text) {
  const found = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  if (text !== undefined) found.textContent = text;
  return found;
}
function picture(width, height, words) {
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words });
  svg.append(draw("title", {}, words));
  return svg;
}
// A figure keeps the value that it shows, as the coordinator gave it.
const figure = (field, value, text) => ({ field, value, text });
function keep(cell, shown) {
  cell.dataset.field = shown.field;
  cell.dataset.value = JSON.stringify(shown.value === undefined ? null : shown.value);
  cell.textContent = shown.text;
}
function fill(id, heads, rows, nothing) {
  const table = byId(id);
  const focused = table.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  if (!rows.length) {
    const row = make("tr");
    row.append(make("td", nothing, { class: "note" }));
    table.replaceChildren(row);
    return;
  }
  const head = make("tr");
  for (const [text, kind] of heads) head.append(make("th", text, { class: kind || "", scope: "col" }));
  table.replaceChildren(head, ...rows.map((row) => {
    const line = make("tr", null, row.attributes);
    row.cells.forEach((cell, i) => {
      const box = make("td", null, { class: [heads[i][1] || "", cell.kind || ""].join(" ").trim() });
      if (cell instanceof Node) box.append(cell);
      else if (typeof cell === "object") keep(box, cell);
      else box.textContent = cell;
      line.append(box);
    });
    return line;
  }));
  if (focused) table.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
}

// --- jobs ---
function showJobs(found) {
  const waiting = found.jobs.filter((job) => job.state === "pending").length;
  const going = found.jobs.filter((job) => !["finished", "failed", "cancelled", "held", "pending"].includes(job.state)).length;
  const left = found.num_jobs - found.jobs.length;
  byId("queue").textContent = `${going} at work, ${waiting} waiting, ${found.num_jobs} in all` + (left ? `; the oldest ${left} are not listed` : "");
  const heads = [["Job"], ["Name", "wide"], ["State"], ["Step", "num"], ["Loss", "num"], ["Validation", "num wide"], ["Tokens/s", "num wide"], ["Workers", "num wide"], ["Why", "wide long"]];
  fill("job-table", heads, [...found.jobs].reverse().map((job) => {
    const button = make("button", job.job, { type: "button", "data-key": job.job, "aria-pressed": String(job.job === state.chosen) });
    button.addEventListener("click", () => choose(job.job));
    return {
      attributes: { "data-job": job.job, class: job.job === state.chosen ? "chosen" : "" },
      cells: [
        button,
        figure("name", job.name, job.name),
        { ...figure("state", job.state, job.state), kind: job.state },
        figure("step", job.step, `${job.step}/${steps(job.total_steps)}`),
        figure("loss", job.loss, number(job.loss)),
        figure("evaluation_loss", job.evaluation_loss, number(job.evaluation_loss)),
        figure("tokens_per_s", job.tokens_per_s, grouped(job.tokens_per_s)),
        figure("num_workers", job.num_workers, String(job.num_workers)),
        figure("reason", job.reason, job.reason || "-"),
      ],
    };
  }), "no jobs yet: skein submit job.yaml");
}
function choose(job) {
  state.chosen = job;
  state.seen = "";
  history.replaceState(null, "", "#" + encodeURIComponent(job));
  show();
}
function showFacts(job) {
  byId("job-name").textContent = `${job.name} (${job.job})`;
  byId("job-reason").textContent = job.reason ? `${job.state}: ${job.reason}` : job.state;
  const shortfalls = job.shortfalls.map((x) => `stage ${x.stage}: ${x.num_holders} of ${x.num_asked} holders`).join("; ");
  const facts = [
    ["Step", figure("step", job.step, `${job.step} of ${steps(job.total_steps)}`)],
    ["Loss", figure("loss", job.loss, number(job.loss))],
    ["Validation loss", figure("evaluation_loss", job.evaluation_loss, number(job.evaluation_loss))],
    ...(job.balance_loss === null ? [] : [
      ["Balance of experts", figure("balance_loss", job.balance_loss, `${number(job.balance_loss)} (1: even)`)],
      ["Choices dropped", figure("drop_ratio", job.drop_ratio, percent(job.drop_ratio))],
      ["Busiest expert", figure("busiest_expert", job.busiest_expert, share(job.busiest_expert))],
      ["Idlest expert", figure("idlest_expert", job.idlest_expert, share(job.idlest_expert))],
    ]),
    ["Tokens", figure("num_tokens", job.num_tokens, grouped(job.num_tokens))],
    ["Tokens per second", figure("tokens_per_s", job.tokens_per_s, grouped(job.tokens_per_s))],
    ["Step, planned", figure("predicted_step_s", job.predicted_step_s, job.predicted_step_s ? seconds(job.predicted_step_s) : "-")],
    ["Step, measured", figure("measured_step_s", job.measured_step_s, seconds(job.measured_step_s))],
    ["Generation", figure("generation", job.generation, String(job.generation))],
    ["Checkpoint", figure("checkpoint_version", job.checkpoint_version, job.checkpoint_version === null ? "-" : `step ${job.checkpoint_version}`)],
    ["Incidents", figure("num_incidents", job.num_incidents, String(job.num_incidents))],
    ["Steps lost", figure("num_steps_lost", job.num_steps_lost, String(job.num_steps_lost))],
    ["Submitted", figure("submitted_wall_s", job.submitted_wall_s, clock(job.submitted_wall_s))],
    ["Holders", figure("shortfalls", job.shortfalls, shortfalls || "as asked")],
  ];
  byId("job-facts").replaceChildren(...facts.map(([name, shown]) => {
    const pair = make("div"), value = make("dd");
    keep(value, shown);
    pair.append(make("dt", name), value);
    return pair;
  }));
  byId("job-facts").dataset.job = job.job;
}

// --- curves ---
function showCurve(points) {
  const box = byId("curve"), width = 560, height = 240, left = 48, bottom = 22;
  const losses = points.filter((p) => p.loss !== null), validations = points.filter((p) => p.validation_loss !== null);
  const values = [...losses.map((p) => p.loss), ...validations.map((p) => p.validation_loss)];
  if (!values.length) return box.replaceChildren(make("p", "no step yet", { class: "note" }));
  const low = Math.min(...values), high = Math.max(...values), first = points[0].step, last = points[points.length - 1].step;
  const x = (step) => left + (width - left - 8) * (step - first) / Math.max(1, last - first);
  const y = (value) => 8 + (height - bottom - 12) * (high - value) / (high - low || 1);
  const newest = losses[losses.length - 1], checked = validations[validations.length - 1];
  const svg = picture(width, height, "Loss by step"
    + (newest ? `: ${number(newest.loss)} after step ${newest.step}` : "") + (checked ? `, validation ${number(checked.validation_loss)} after step ${checked.step}` : ""));
  for (const part of [0, 0.5, 1]) {
    const value = low + (high - low) * part;
    svg.append(draw("line", { class: "axis", x1: left, x2: width - 8, y1: y(value), y2: y(value) }), draw("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, number(value)));
  }
  svg.append(draw("text", { x: left, y: height - 6 }, `step ${first}`), draw("text", { x: width - 8, y: height - 6, "text-anchor": "end" }, `step ${last}`));
  svg.append(draw("polyline", { class: "loss", points: losses.map((p) => `${x(p.step).toFixed(1)},${y(p.loss).toFixed(1)}`).join(" ") }));
  for (const p of validations) svg.append(draw("circle", { class: "val", r: 3, cx: x(p.step).toFixed(1), cy: y(p.validation_loss).toFixed(1) }));
  box.replaceChildren(svg);
}

// --- experts ---
const many = new Map([["most", "the busiest expert"], ["least", "the idlest expert"], ["mean", "an expert on average"]]);
function showExperts(layers) {
  byId("experts").hidden = !layers.length;
  const width = 560, left = 62, row = 34;
  const svg = picture(width, layers.length * row + 4, `Tokens by expert in ${layers.length} layers`);
  layers.forEach(({ layer, tokens }, i) => {
    const names = Object.keys(tokens).sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    const even = tokens.mean || Object.values(tokens).reduce((sum, x) => sum + x, 0) / names.length || 1;
    const most = Math.max(even, ...Object.values(tokens)), base = (i + 1) * row, each = (width - left) / names.length;
    const height = (x) => (row - 6) * x / most;
    svg.append(draw("text", { x: left - 8, y: base - 4, "text-anchor": "end" }, `layer ${layer}`));
    names.forEach((name, k) => {
      const tall = height(tokens[name]);
      const bar = draw("rect", { class: "expert", x: (left + k * each + 1).toFixed(1), y: (base - tall).toFixed(1), width: Math.max(1, each - 2).toFixed(1), height: tall.toFixed(1) });
      bar.append(draw("title", {}, `layer ${layer}, ${many.get(name) || "expert " + name}: ${grouped(tokens[name])} choices, ${share(tokens[name] / even)}`));
      svg.append(bar);
    });
    svg.append(draw("line", { class: "even", x1: left, x2: width, y1: (base - height(even)).toFixed(1), y2: (base - height(even)).toFixed(1) }));
  });
  byId("expert-bars").replaceChildren(svg);
}

// --- one step ---
const hue = (i) => Math.round(i * 137.508) % 360;
function showStep(step) {
  const box = byId("step");
  if (!step.planned && !step.measured) return box.replaceChildren(make("p", step.workers ? "too many ops to draw" : "no plan yet", { class: "note" }));
  const kinds = [["planned", step.planned, step.planned_s], ["measured", step.measured, step.measured_s]].filter(([, bars]) => bars);
  const longest = Math.max(...kinds.map(([, bars, whole]) => Math.max(whole || 0, ...bars.map((bar) => bar[5]))), 1e-9);
  const row = 16, left = 84, width = 560, gap = 30, shards = new Set(step.shards);
  const height = kinds.length * (step.workers.length * row + gap);
  const svg = picture(width, height, kinds.map(([name, bars, whole]) => `${name}: ${bars.length} ops of ${step.workers.length} workers in ${seconds(whole)}`).join("; "));
  kinds.forEach(([name, bars, whole], block) => {
    const top = block * (step.workers.length * row + gap) + gap - 6;
    svg.append(draw("text", { class: "name", x: 0, y: top - 8 }, `${name}: ${seconds(whole)}`));
    const ends = {};
    for (const bar of bars) ends[bar[0]] = Math.max(ends[bar[0]] || 0, bar[5]);
    step.workers.forEach((worker, i) => {
      svg.append(draw("text", { x: left - 6, y: top + i * row + 11, "text-anchor": "end" }, worker.length > 12 ? worker.slice(0, 11) + "…" : worker));
      const scale = (width - left - 4) / longest, end = Math.max(...Object.values(ends), 0);
      if (whole > end) svg.append(draw("rect", { class: "rest", x: (left + end * scale).toFixed(1), y: top + i * row + 6, width: ((whole - end) * scale).toFixed(1), height: 2 }));
    });
    for (const [worker, kind, stage, microbatch, begin, end] of bars) {
      const scale = (width - left - 4) / longest;
      const mark = draw("rect", {
        class: `op ${kind}` + (shards.has(stage) ? " shard" : ""),
        x: (left + begin * scale).toFixed(2), y: top + step.workers.indexOf(worker) * row + 1, height: row - 3, rx: 1,
        width: Math.max(0.4, (end - begin) * scale).toFixed(2),
      });
      mark.style.setProperty("--hue", hue(microbatch));
      const what = shards.has(stage) ? "a shard of the vocabulary, stage" : "stage";
      mark.append(draw("title", {}, `${step.words[kind]} of microbatch ${microbatch}, ${what} ${stage} on ${worker}: ${seconds(begin)} to ${seconds(end)}`));
      svg.append(mark);
    }
  });
  const drawn = new Set(kinds.flatMap(([, bars]) => bars.map((bar) => bar[1])));
  const keys = Object.entries(step.words).filter(([kind]) => drawn.has(kind));
  if (shards.size) keys.push(["shard", "of a shard of the vocabulary"]);
  byId("step-key").replaceChildren(...keys.map(([kind, words]) => make("span", words, { class: `key op ${kind}` })), " (a colour for each microbatch; thin: aggregation and decision)");
  box.replaceChildren(svg);
}

// --- incidents ---
function showIncidents(incidents) {
  fill("incident-table", [["When"], ["Step", "num"], ["What"], ["Workers"], ["Remedy", "wide"], ["Took", "num"], ["Steps lost", "num"]],
    [...incidents].reverse().map((x) => ({ cells: [clock(x.wall_s), String(x.step + 1), x.kind.replaceAll("_", " "), x.workers.join(", ") || "-", x.remedy.replaceAll("_", " "), seconds(x.seconds), figure("num_steps_lost", x.num_steps_lost, String(x.num_steps_lost))] })), "none");
}

// --- workers ---
function showWorkers(found) {
  fill("worker-table", [["Worker"], ["State"], ["Site", "wide"], ["Device", "wide"], ["Job"], ["Stages"], ["Memory", "num wide"], ["Heard", "num"]],
    found.workers.map((x) => ({
      attributes: { "data-worker": x.worker },
      cells: [x.worker, { ...figure("state", x.state, x.state), kind: x.state }, figure("site", x.site, x.site), x.profile.device, figure("job", x.job, x.job || "-"),
        figure("stages", x.stages, x.stages.join(", ") || "-"), figure("memory_bytes", x.profile.memory_bytes, bytes(x.profile.memory_bytes)), `${x.beat_age_s.toFixed(0)} s ago`],
    })), "no workers yet: skein worker up --join HOST:PORT");
  fill("link-table", [["From"], ["To"], ["Latency", "num"], ["Bandwidth", "num"]],
    found.links.map((x) => ({ attributes: { "data-link": `${x.sender}>${x.receiver}` }, cells: [x.sender, x.receiver, figure("latency_s", x.latency_s, seconds(x.latency_s)), figure("bytes_per_s", x.bytes_per_s, bytes(x.bytes_per_s) + "/s")] })), "none measured yet");
}
function showMap(found) {
  const box = byId("map"), here = found.workers.filter((x) => x.state !== "lost");
  if (!here.length || here.length > 48) return box.replaceChildren(make("p", here.length ? `${here.length} workers: see the table` : "nobody is here", { class: "note" }));
  const width = 560, height = 380, sites = [...new Set(here.map((x) => x.site))].sort();
  const ordered = [...here].sort((a, b) => sites.indexOf(a.site) - sites.indexOf(b.site) || (a.worker < b.worker ? -1 : 1));
  const place = new Map(ordered.map((x, i) => {
    const turn = 2 * Math.PI * i / ordered.length - Math.PI / 2;
    return [x.worker, [width / 2 + 190 * Math.cos(turn), height / 2 + 130 * Math.sin(turn)]];
  }));
  const svg = picture(width, height, `${here.length} workers at ${sites.length} sites: ` + ordered.slice(0, 12).map((x) => `${x.worker} ${x.stages.length ? "holds stage " + x.stages.join(", ") : x.state}`).join("; "));
  const fastest = Math.max(...found.links.map((x) => x.bytes_per_s), 1);
  for (const link of found.links) {
    const from = place.get(link.sender), to = place.get(link.receiver);
    if (!from || !to) continue;
    const line = draw("line", { class: "link", x1: from[0].toFixed(1), y1: from[1].toFixed(1), x2: to[0].toFixed(1), y2: to[1].toFixed(1), "stroke-width": (0.4 + 3 * link.bytes_per_s / fastest).toFixed(2) });
    line.append(draw("title", {}, `${link.sender} to ${link.receiver}: ${seconds(link.latency_s)}, ${bytes(link.bytes_per_s)}/s`));
    svg.append(line);
  }
  for (const x of ordered) {
    const [cx, cy] = place.get(x.worker);
    const mark = draw("circle", { class: "dot", cx: cx.toFixed(1), cy: cy.toFixed(1), r: 14, fill: x.stages.length ? `hsl(${hue(x.stages[0] + 1)},55%,48%)` : "var(--idle)" });
    mark.append(draw("title", {}, `${x.worker} at ${x.site}, ${x.state}` + (x.job ? `, ${x.job}` : "")));
    svg.append(mark, draw("text", { class: "name", x: cx.toFixed(1), y: (cy + 29).toFixed(1), "text-anchor": "middle" }, x.worker),
      draw("text", { x: cx.toFixed(1), y: (cy + 42).toFixed(1), "text-anchor": "middle" }, x.stages.length ? `stage ${x.stages.join(", ")}` : x.state));
  }
  box.replaceChildren(svg);
}
function showBytes(found) {
  fill("bytes-table", [["Rule"], ["From"], ["To"], ["Sent", "num"]],
    found.aggregation.map((x) => ({ cells: [x.rule, x.sender, x.receiver, figure("num_bytes", x.num_bytes, bytes(x.num_bytes))] })), "none yet");
}

// --- news ---
async function asked(path) {
  const reply = await fetch(path);
  if (!reply.ok) throw new Error(`${path}: ${reply.status}`);
  return reply.json();
}
async function load() {
  if (state.loading) { state.again = true; return; }
  state.loading = true;
  try {
    const path = `/api/jobs/${encodeURIComponent(state.chosen)}`, chosen = state.chosen;
    const [job, curve, incidents, step, experts] = await Promise.all(["", "/curve", "/incidents", "/step", "/experts"].map((x) => asked(path + x)));
    if (chosen === state.chosen) {
      byId("job").hidden = false;
      showFacts(job); showCurve(curve); showIncidents(incidents); showStep(step); showExperts(experts);
      document.body.dataset.job = chosen;
    }
  } catch (error) {
    state.seen = "";
  }
  state.loading = false;
  if (state.again) { state.again = false; load(); }
}
function show() {
  const found = state.overview;
  if (!found) return;
  byId("about").textContent = `release ${found.release}, epoch ${found.epoch}, ${found.workers.filter((x) => x.state !== "lost").length} workers`;
  const going = found.jobs.find((job) => job.num_workers > 0);
  if (!found.jobs.some((job) => job.job === state.chosen)) state.chosen = (going || found.jobs[found.jobs.length - 1] || { job: null }).job;
  showJobs(found); showWorkers(found); showMap(found); showBytes(found);
  const job = found.jobs.find((x) => x.job === state.chosen);
  byId("job").hidden = !job;
  const seen = job ? JSON.stringify([job.job, job.step, job.state, job.reason, job.generation, job.num_incidents, job.evaluation_loss, job.checkpoint_version, job.measured_step_s]) : "";
  if (job && seen !== state.seen) { state.seen = seen; load(); }
}
function live(text, kind) {
  if (byId("live").textContent !== text) byId("live").textContent = text;
  byId("live").className = kind;
}
const source = new EventSource("/api/live");
source.addEventListener("message", (event) => {
  state.overview = JSON.parse(event.data);
  live("live", "on");
  show();
  if (!performance.getEntriesByName("figures").length) performance.mark("figures");
});
source.addEventListener("error", () => live(source.readyState === EventSource.CLOSED ? "ended: reload, or run skein page again" : "not reached, trying again", "off"));
