"use strict";
// The page of /ui. It reads its state and the new samples of its history every 2 s, and draws both.
// Words of the router get into the page as text nodes and attributes alone, never as markup.
const EVERY_MS = 2000;
const LENGTH_S = 600;
const OLD_S = 10;  // an older value says how old it is
const FLOW_S = 10;  // the graph shows means over so long
const SVG = "http://www.w3.org/2000/svg";
const STATE_URL = location.pathname.replace(/\/+$/, "") + "/state";

const kept = { samples: [], events: [], since: {}, began: null, every: 2 };
let before = null, lastAt = 0, awaySince = null, latest = null;
let picked = null;  // the time that the slider points to; null: now

// ---- words and numbers ----------------------------------------------------------------------

const el = (tag, text, cls) => {
  const node = document.createElement(tag);
  if (text !== undefined && text !== null) node.append(text);
  if (cls) node.className = cls;
  return node;
};
const shape = (tag, attributes, text) => {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.append(text);
  return node;
};
const byId = id => document.getElementById(id);
const isNumber = value => typeof value === "number" && isFinite(value);
const number = (value, digits = 0) => isNumber(value)
  ? value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits }) : "–";
const short = value => number(value, !isNumber(value) || value >= 100 || value === 0 ? 0 : value >= 10 ? 1 : 2);
const bytes = value => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; value >= 1024 && at < units.length - 1; at++) value /= 1024;
  return `${number(value, at ? 1 : 0)} ${units[at]}`;
};
const time = value => !isNumber(value) ? "–" : value < 0.0995 ? `${number(1000 * value, 1)} ms`
  : value < 0.9995 ? `${number(1000 * value, 0)} ms` : `${number(value, 2)} s`;
const percent = value => isNumber(value) ? `${number(100 * value, 1)} %` : "–";
const clock = at => new Date(1000 * at).toLocaleTimeString("en-GB");
const age = seconds => seconds < 1 ? "just now" : seconds < 100 ? `${number(seconds)} s`
  : seconds < 5940 ? `${number(seconds / 60)} min` : `${number(seconds / 3600, 1)} h`;
const total = counts => Object.values(counts || {}).reduce((sum, value) => sum + value, 0);
const setText = (node, text) => { if (node.textContent !== text) node.textContent = text; };
const EVENTS = {
  down: event => `down: ${event.why}`, up: event => `up again (was: ${event.why})`,
  restarted: event => event.why ? `restarted: ${event.why}` : "restarted",
  added: () => "added", gone: () => "gone", leaves: event => `leaves: ${event.why}`,
};
const said = event => (EVENTS[event.kind] || (() => event.kind))(event);
const isGood = event => ["up", "added"].includes(event.kind);

// ---- tables ---------------------------------------------------------------------------------

const WORDS = new Set(["state", "decode", "over", "reason", "what", "engines", "engine", "to"]);
// Roles by name: as cards, on a narrow screen, a table's parts would lose them.
const fill = (id, head, rows, none) => {
  const table = el("table"), top = el("thead"), body = el("tbody"), line = el("tr");
  table.setAttribute("role", "table");
  table.setAttribute("aria-labelledby", `h-${id}`);
  for (const part of [top, body]) part.setAttribute("role", "rowgroup");
  line.setAttribute("role", "row");
  for (const name of head) {
    const cell = el("th", name, WORDS.has(name) ? "left" : "");
    cell.scope = "col";
    cell.setAttribute("role", "columnheader");
    line.append(cell);
  }
  top.append(line);
  for (const row of rows) {
    const next = el("tr");
    next.setAttribute("role", "row");
    row.forEach((value, place) => {
      const cell = value instanceof Node ? value : el("td", value);
      if (WORDS.has(head[place])) cell.classList.add("left");
      cell.setAttribute("role", "cell");
      cell.dataset.label = head[place];
      next.append(cell);
    });
    body.append(next);
  }
  if (!rows.length) {
    const next = el("tr"), cell = el("td", none, "dim none");
    cell.colSpan = head.length;
    next.setAttribute("role", "row");
    cell.setAttribute("role", "cell");
    next.append(cell);
    body.append(next);
  }
  table.append(top, body);
  byId(id).replaceChildren(table);
};
const usage = share => {
  if (!isNumber(share)) return el("td", "–");
  const cell = el("td"), whole = el("span"), bar = el("span", null, "bar"), part = el("i");
  part.style.width = `${Math.max(0, Math.min(100, 100 * share))}%`;
  bar.append(part);
  whole.append(bar, percent(share));
  cell.append(whole);
  return cell;
};

// ---- charts ---------------------------------------------------------------------------------

// `series` gives the names and values of a sample; `all` the names of a whole history. A chart that
// `needs` a part of the router's state is left out where the deployment has no such part.
const pair = name => ({
  all: () => ["p50", "p99"], value: (sample, which) => (sample[name] || [])[which === "p50" ? 0 : 1],
});
const one = (label, name) => ({ all: () => [label], value: sample => sample[name] });
const CHARTS = [
  { title: "Requests a second", unit: short, ...one("requests/s", "requests") },
  { title: "Tokens a second", unit: short, ...one("tokens/s", "tokens"), note: "of all decode engines" },
  { title: "First token", unit: time, ...pair("ttft"),
    note: "to an answer's first byte; percentiles from histograms" },
  { title: "Between tokens", unit: time, ...pair("between"), note: () => {
    const last = kept.samples.findLast(sample => sample.between);
    return last && last.between_of === "chunks"
      ? "each answer counts with its mean time between chunks" : "of engines; percentiles from histograms";
  } },
  { title: "Failed requests a second", unit: short, ...one("requests/s", "failed"), note: "answered with 500 or more" },
  { title: "In flight", unit: value => number(value), ...one("requests", "in_flight"), note: "requests with a seat at a decode engine" },
  { title: "Queue", unit: value => number(value), ...one("requests", "queued"), note: "requests that wait for an engine" },
  { title: "KV cache in use", unit: percent, top: 1,
    all: () => [...new Set(kept.samples.flatMap(sample => Object.keys(sample.kv)))].sort(),
    value: (sample, name) => sample.kv[name] },
  { title: "KV moved", unit: value => isNumber(value) ? `${short(value / 1e9)} GB/s` : "–", ...one("GB/s", "speed"), dots: true,
    note: () => {
      const sample = picked === null ? kept.samples.findLast(one => isNumber(one.hidden)) : nearest(picked);
      return "mean of the handoffs: bytes over the seconds that they took, not over all time"
        + (sample && isNumber(sample.hidden) ? `; ${percent(sample.hidden)} hidden behind prefill` : "");
    } },
  { title: "Prompt tokens from caches", unit: percent, top: 1, needs: "caches", ...one("of prompts", "spared"), dots: true,
    note: "share of the prompts that prefill engines need not compute" },
  { title: "Fetched from other caches", unit: value => isNumber(value) ? `${short(value)} tokens/s` : "–", needs: "sharing",
    ...one("tokens/s", "shared"), note: "that the engine itself did not hold" },
];
const isShown = chart => chart.box !== undefined && chart.box.isConnected;

const last = (name, chart) => kept.samples.findLast(sample => isNumber(chart.value(sample, name)));
const nice = value => {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map(step => step * unit).find(step => step >= value * 0.9999);
};
const nearest = at => kept.samples.reduce(
  (best, sample) => !best || Math.abs(sample.at - at) < Math.abs(best.at - at) ? sample : best, null);

function makeCharts() {
  for (const chart of CHARTS) {
    chart.box = el("figure");
    chart.caption = el("figcaption");
    chart.svg = shape("svg", { role: "img", height: 116 });
    chart.svg.addEventListener("pointermove", event => pickFrom(event, chart));
    chart.svg.addEventListener("pointerleave", event => { if (event.pointerType === "mouse") pick(null); });
    chart.box.append(chart.caption, chart.svg);
  }
}

function placeCharts(now) {
  const wanted = CHARTS.filter(chart => !chart.needs || now.router[chart.needs]).map(chart => chart.box);
  const there = [...byId("charts").children];
  if (wanted.length !== there.length || wanted.some((box, place) => box !== there[place]))
    byId("charts").replaceChildren(...wanted);
}

function caption(chart, names) {
  const values = el("span", null, "values");
  const shown = names.map(name => {
    const sample = picked === null ? last(name, chart) : nearest(picked);
    return { name, at: sample && sample.at, value: sample && chart.value(sample, name) };
  });
  if (names.length > 2 && picked === null) shown.sort((a, b) => (b.value || 0) - (a.value || 0));
  shown.slice(0, 4).forEach(({ name, value }) => {
    const part = el("span");
    if (names.length > 1) {
      const key = shape("svg", { class: "key", width: 16, height: 8, "aria-hidden": "true" });
      key.append(shape("line", { class: `series s${names.indexOf(name) % 4}`, x1: 0, x2: 16, y1: 4, y2: 4 }));
      part.append(key, `${name} `);
    }
    part.append(chart.unit(value));
    values.append(part);
  });
  if (shown.length > 4) values.append(el("span", `and ${shown.length - 4} more`));
  const at = shown.length ? shown[0].at : undefined;
  const isOld = picked === null && isNumber(at) && lastAt - at > OLD_S;
  const words = typeof chart.note === "function" ? chart.note() : chart.note;
  const parts = [words, isOld && `last value ${age(lastAt - at)} ago, at ${clock(at)}`].filter(Boolean);
  chart.caption.replaceChildren(el("b", chart.title), values, ...(parts.length ? [el("small", parts.join("; "))] : []));
}

function draw(chart) {
  const names = chart.all(), samples = kept.samples;
  caption(chart, names);
  const width = Math.max(200, chart.svg.clientWidth || 300), high = 116;
  const left = 4, right = width - 4, top = 18, bottom = high - 18, begin = lastAt - LENGTH_S;
  const x = at => left + (right - left) * (at - begin) / LENGTH_S;
  const values = names.flatMap(name => samples.map(sample => chart.value(sample, name)).filter(isNumber));
  const largest = values.length ? values.reduce((a, b) => Math.max(a, b)) : null;
  const ceiling = chart.top && largest <= chart.top ? chart.top : nice(largest);
  const y = value => bottom - (bottom - top) * Math.max(0, value) / ceiling;
  chart.svg.setAttribute("viewBox", `0 0 ${width} ${high}`);
  const nodes = [
    shape("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }),
    shape("line", { class: "axis", x1: left, x2: right, y1: top, y2: top }),
    shape("text", { x: left, y: top - 5 }, chart.unit(ceiling)),
    shape("text", { x: left, y: high - 4 }, `${clock(begin).slice(0, 5)}`),
    shape("text", { x: right, y: high - 4, "text-anchor": "end" }, "now"),
    shape("text", { x: (left + right) / 2, y: high - 4, "text-anchor": "middle" }, "5 min ago"),
  ];
  for (const event of kept.events) {
    const at = x(event.at), kind = isGood(event) ? " up" : "";
    if (at < left) continue;
    const group = shape("g", {});
    group.append(
      shape("title", {}, `${clock(event.at)} ${event.engine} ${said(event)}`),
      shape("line", { class: `event${kind}`, x1: at, x2: at, y1: top - 4, y2: bottom }),
      shape("path", { class: `mark${kind}`, d: isGood(event)
        ? `M${at - 4} ${top - 4}h8l-4 -7z` : `M${at - 4} ${top - 11}h8l-4 7z` }));
    nodes.push(group);
  }
  names.forEach((name, place) => {
    const style = `s${place % 4}`;
    let path = "", then = null;
    for (const sample of samples) {
      const value = chart.value(sample, name);
      if (!isNumber(value) || sample.at < begin) { if (!chart.dots) then = null; continue; }
      const apart = then === null || sample.at - then > 3 * kept.every;
      path += `${apart ? "M" : "L"}${x(sample.at).toFixed(1)} ${y(value).toFixed(1)}`;
      if (apart) nodes.push(shape("circle", { class: `dot ${style}`, cx: x(sample.at), cy: y(value), r: 1.5 }));
      then = sample.at;
    }
    if (path) nodes.push(shape("path", { class: `series ${style}`, d: path }));
  });
  if (picked !== null) nodes.push(shape("line", { class: "cursor", x1: x(picked), x2: x(picked), y1: top, y2: bottom }));
  chart.svg.replaceChildren(...nodes);
  const words = names.map(name => {
    const sample = last(name, chart);
    return `${name} ${sample ? chart.unit(chart.value(sample, name)) : "no value"}`;
  }).join(", ");
  chart.svg.setAttribute("aria-label",
    `${chart.title}: ${words || "no value"} at last; largest in ten minutes ${largest === null ? "none" : chart.unit(largest)}`);
}

function pick(at) {
  picked = at;
  const slider = byId("when"), sample = at === null ? null : nearest(at);
  slider.max = Math.max(0, kept.samples.length - 1);
  slider.value = sample ? kept.samples.indexOf(sample) : slider.max;
  const words = sample ? `${clock(sample.at)}, ${age(lastAt - sample.at)} ago` : "now";
  setText(byId("when-text"), words);
  byId("now").hidden = at === null;
  slider.setAttribute("aria-valuetext", words);
  CHARTS.filter(isShown).forEach(draw);
}

function pickFrom(event, chart) {
  const box = chart.svg.getBoundingClientRect();
  const share = (event.clientX - box.left - 4) / (box.width - 8);
  const sample = nearest(lastAt - LENGTH_S * (1 - share));
  if (sample) pick(sample.at);
}

// ---- the graph of engines -------------------------------------------------------------------

function flows() {
  const samples = kept.samples.filter(sample => sample.at > lastAt - FLOW_S), pairs = new Map(), to = {};
  const share = 1 / Math.max(1, samples.length);
  for (const sample of samples) {
    for (const [prefill, decode, rate] of sample.pairs) {
      const key = JSON.stringify([prefill, decode]);
      pairs.set(key, (pairs.get(key) || 0) + (rate || 0) * share);
    }
    for (const [decode, rate] of Object.entries(sample.to)) to[decode] = (to[decode] || 0) + (rate || 0) * share;
  }
  const requests = {};
  for (const [key, rate] of pairs) requests[JSON.parse(key)[1]] = (requests[JSON.parse(key)[1]] || 0) + rate;
  return [...pairs].map(([key, rate]) => {
    const [prefill, decode] = JSON.parse(key);
    return { prefill, decode, rate, moved: rate ? (to[decode] || 0) * rate / requests[decode] : 0,
      isShare: rate < requests[decode] };
  });
}

function drawFlow(now) {
  const svg = byId("flow"), width = Math.max(280, svg.clientWidth || 300), found = flows();
  const sides = ["prefill", "decode"].map(role => now.engines.filter(engine => engine.role === role));
  const rows = Math.max(1, ...sides.map(side => side.length)), step = 66, high = rows * step + 8;
  const box = Math.min(210, Math.floor(width * 0.33)), place = new Map(), nodes = [];
  sides.forEach((side, which) => side.forEach((engine, row) => {
    const offset = (rows - side.length) * step / 2;
    place.set(engine.name, { x: which ? width - box - 2 : 2, y: 8 + offset + row * step, row });
  }));
  svg.setAttribute("viewBox", `0 0 ${width} ${high}`);
  svg.setAttribute("height", high);
  const known = new Map(now.router.pairings.map(p => [JSON.stringify([p.prefill, p.decode]), p]));
  const rates = new Map(found.map(flow => [JSON.stringify([flow.prefill, flow.decode]), flow]));
  const edges = [...known.keys(), ...[...rates.keys()].filter(key => !known.has(key))]
    .map(key => rates.get(key) || { prefill: JSON.parse(key)[0], decode: JSON.parse(key)[1], rate: 0, moved: 0 })
    .filter(flow => place.has(flow.prefill) && place.has(flow.decode));
  const most = Math.max(1e-9, ...edges.map(flow => flow.rate));
  const hasWords = edges.length <= 2 || (width > 640 && edges.length <= 9), labels = [];
  const count = Math.max(1, sides[1].length);
  for (const flow of edges) {
    const from = place.get(flow.prefill), to = place.get(flow.decode);
    const [x1, y1, x2, y2] = [from.x + box, from.y + 26, to.x, to.y + 26];
    nodes.push(shape("line", { class: flow.rate ? "edge" : "edge idle", x1, y1, x2, y2,
      "stroke-width": flow.rate ? 1.5 + 4 * flow.rate / most : 1 }));
    if (!hasWords) continue;
    // So far left that words of edges to one engine are apart, and a place of its own for each.
    const part = count === 1 && sides[0].length === 1 ? 0.5 : 0.2 + 0.25 * to.row / Math.max(1, count - 1);
    const x = x1 + part * (x2 - x1), y = y1 + part * (y2 - y1);
    const words = [`${short(flow.rate)} req/s`, `${flow.isShare ? "≈ " : ""}${short(flow.moved / 1e6)} MB/s`];
    const wide = 6.4 * Math.max(...words.map(word => word.length)) + 6;
    labels.push(shape("rect", { class: "paper", x: x - wide / 2, y: y - 14, width: wide, height: 28, rx: 4 }));
    words.forEach((word, line) => labels.push(
      shape("text", { x, y: y - 3 + 12 * line, "text-anchor": "middle" }, word)));
  }
  nodes.push(...labels);
  for (const engine of [...sides[0], ...sides[1]]) {
    const { x, y } = place.get(engine.name), isUp = engine.state === "up", fits = Math.floor((box - 14) / 6.2);
    const figures = [isNumber(engine.kv_usage) && `KV ${number(100 * engine.kv_usage)} %`,
      isNumber(engine.running) && `${number(engine.running)} running`].filter(Boolean);
    const cut = text => text.length > fits ? `${text.slice(0, fits - 1)}…` : text;
    const group = shape("g", {});
    group.append(shape("title", {}, `${engine.name}: ${engine.state}`),
      shape("rect", { class: isUp ? "node" : "node bad", x, y, width: box, height: 52, rx: 6 }),
      shape("text", { class: "name", x: x + 7, y: y + 16 }, engine.name.length * 7.6 > box - 14
        ? `…${engine.name.slice(-Math.floor((box - 22) / 7.6))}` : engine.name),
      shape("text", { class: isUp ? "good" : "bad", x: x + 7, y: y + 31 }, cut(engine.state)),
      shape("text", { x: x + 7, y: y + 45 }, cut(figures.join(", "))));
    nodes.push(group);
  }
  svg.replaceChildren(...nodes);
  svg.setAttribute("aria-label", edges.length ? edges.map(flow =>
    `${flow.prefill} to ${flow.decode}: ${short(flow.rate)} requests a second, ${short(flow.moved / 1e6)} MB/s`)
    .join("; ") : "no handoff yet");
  setText(byId("flow-note"), `Means over the last ${FLOW_S} s.`
    + (edges.some(flow => flow.isShare) ? " ≈: an engine's bytes, by each pairing's share of its requests." : "")
    + (hasWords ? "" : " The numbers are under Pairings."));
}

// ---- the page -------------------------------------------------------------------------------

function remember(told) {
  if (kept.began !== null && told.began > kept.began + 1)
    kept.events.push({ at: told.began, engine: "router", kind: "restarted", why: "" });
  kept.began = told.began;
  kept.every = told.every_s;
  kept.since = told.engines;
  const newest = kept.samples.length ? kept.samples.at(-1).at : 0;
  kept.samples.push(...told.samples.filter(sample => sample.at > newest));
  kept.samples = kept.samples.filter(sample => sample.at > lastAt - LENGTH_S);
  const known = new Set(kept.events.map(event => JSON.stringify(event)));
  kept.events.push(...told.events.filter(event => !known.has(JSON.stringify(event))));
  kept.events = kept.events.slice(-200);
}

const mean = (now, then) => {  // since the last refresh, else of all requests
  const count = now.count - (then ? then.count : 0);
  if (count > 0 && then) return [time((now.sum - then.sum) / count), "mean of the last 2 s"];
  return [now.count > 0 ? time(now.sum / now.count) : "–", "mean since the start"];
};
const percentiles = name => {
  const sample = kept.samples.findLast(one => one[name]);
  if (!sample) return ["–", "p50 / p99"];
  const old = lastAt - sample.at > OLD_S ? `, ${age(lastAt - sample.at)} ago` : "";
  return [sample[name].map(time).join(" / "), `p50 / p99 of 2 s${old}`];
};

function figures(now, rate) {
  const times = now.router.seconds, then = before ? before.router.seconds : {};
  const sample = kept.samples.at(-1) || {};
  const shown = [
    ["requests/s", short(sample.requests), ""],
    ["tokens/s", short(sample.tokens), ""],
    ["in flight", number(now.router.in_flight.decode || 0), ""],
    ["queued", number(now.router.queued), ""],
    ["first token", ...percentiles("ttft")],
    ["between tokens", ...percentiles("between")],
    ["prefill leg", ...mean(times.prefill, then.prefill)],
    ["handoff", ...mean(times.handoff, then.handoff)],
  ];
  byId("figures").replaceChildren(...shown.map(([name, value, how]) => {
    const box = el("div", null, "figure"), held = el("dd", value);
    if (how) held.append(el("small", how));
    box.append(el("dt", name), held);
    return box;
  }));
}

function readiness(now) {
  const up = now.engines.filter(engine => engine.state === "up");
  const roles = ["decode", ...new Set(now.engines.map(engine => engine.role))];
  const isReady = roles.every(role => up.some(engine => engine.role === role));
  const away = now.engines.filter(engine => engine.state !== "up");
  const word = isReady ? "ready" : up.some(e => e.role === "decode") ? "degraded: decode only" : "not ready";
  const missing = away.length ? ` · not up: ${away.map(engine => engine.name).join(", ")}` : "";
  const state = byId("state");
  setText(state, word + missing);  // a live region: it speaks only when this changes
  state.className = isReady && !away.length ? "good" : "bad";
  setText(byId("at"), `${up.length} of ${now.engines.length} engines up · ${clock(now.at)}`);
}

function tables(now, rate) {
  const old = name => before && before.engines.find(engine => engine.name === name) || {};
  fill("engines", ["engine", "state", "since", "running", "waiting", "KV cache", "leases", "prompt tok/s", "tok/s"],
    now.engines.map(e => {
      const since = kept.since[e.name];
      return [e.name, el("td", e.state, e.state === "up" ? "good left" : "bad left"),
        isNumber(since) ? `${age(now.at - since)}` : "–",
        number(e.running), number(e.waiting), usage(e.kv_usage), number(e.leases),
        number(rate(e.prompt_tokens, old(e.name).prompt_tokens)),
        number(rate(e.generated_tokens, old(e.name).generated_tokens))];
    }), "no engine");
  fill("events", ["when", "engine", "what"], [...kept.events].reverse().slice(0, 20).map(event =>
    [`${clock(event.at)}`, event.engine, el("td", said(event), isGood(event) ? "good" : "bad")]),
    `none since ${clock(kept.began || now.at)}`);
  fill("groups", ["count", "status", "reason", "first", "last", "example"], now.failure_groups.map(g =>
    [number(g.count), el("td", g.status, g.status < 500 ? "" : "bad"), g.why === undefined ? "–" : g.why,
      clock(g.first), clock(g.last), g.id === undefined ? "–" : g.id]), "none");
  setText(byId("groups-note"), now.failure_groups.some(g => g.why === undefined)
    ? "Reasons and ids are shown to those with a key only: disagg status --key-env NAME." : "");
  const rates = new Map(flows().map(flow => [JSON.stringify([flow.prefill, flow.decode]), flow]));
  fill("pairings", ["prefill", "decode", "requests", "per second", "MB/s"], now.router.pairings.map(p => {
    const flow = rates.get(JSON.stringify([p.prefill, p.decode])) || { rate: 0, moved: 0 };
    return [p.prefill, p.decode, number(p.requests), short(flow.rate),
      `${flow.isShare ? "≈ " : ""}${short(flow.moved / 1e6)}`];
  }), "none yet");
  fill("handoffs", ["to", "over", "loaded", "failed", "aborted", "moved", "hidden", "mean speed"],
    now.engines.flatMap(e => Object.entries(e.handoffs || {}).map(([transport, of]) => [
      e.name, transport, number(of.loaded || 0), number(of.failed || 0), number(of.aborted || 0), bytes(of.bytes || 0),
      percent(of.bytes ? (of.hidden_bytes || 0) / of.bytes : undefined),
      of.bytes && e.handoff_seconds && Object.values(e.handoffs).filter(other => other.bytes).length === 1
        ? `${number(of.bytes / e.handoff_seconds / 1e9, 2)} GB/s` : "–"])), "none yet");
  sharing(now.router);
  const reasons = [
    ...Object.entries(now.router.local).map(([why, count]) => ["router", why, count]),
    ...now.engines.flatMap(e => Object.entries(e.load_failures || {}).map(([why, count]) => [e.name, why, count])),
  ];
  fill("local", ["decided by", "reason", "requests"],
    reasons.map(([decider, why, count]) => [decider, why, number(count)]), "none yet");
  fill("failures", ["when", "status", "what", "engines", "id"], now.failures.map(f => [
    clock(f.at), el("td", f.status, f.status < 500 ? "" : "bad"),
    f.why || [f.retries && `${f.retries} retried`, f.migrations && "stream moved"].filter(Boolean).join(", ") || "–",
    [f.prefill, f.decode].filter(Boolean).join(" → ") || "–", f.id === undefined ? "–" : f.id]), "none");
}

const CAME_OF_IT = {
  leased: "granted a lease", refused: "refused", failed: "no answer in time, or died",
};

function sharing(router) {
  const { sharing: shared, caches } = router;
  byId("sharing-part").hidden = !shared;
  if (!shared) return;
  fill("sharing", ["what", "engines asked"], Object.entries(shared.sources).map(([outcome, count]) =>
    [CAME_OF_IT[outcome] || outcome, number(count)]), "no engine asked yet");
  const all = caches ? caches.prompt_tokens : 0;
  setText(byId("sharing-note"), `${number(shared.tokens)} prompt tokens came from another engine's cache.`
    + (all ? ` Of ${number(all)} prompt tokens at prefill engines, caches spared `
      + `${percent(caches.reported_tokens / all)}, as these engines say.` : ""));
}

function show(now) {
  lastAt = now.at;
  remember(now.history);
  const seconds = before ? now.at - before.at : 0;
  const rate = (a, b) => seconds > 0 && b !== undefined && a >= b ? (a - b) / seconds : undefined;
  readiness(now);
  placeCharts(now);
  figures(now);
  tables(now, rate);
  pick(picked);
  drawFlow(now);
  setText(byId("history-note"), `One sample each ${kept.every} s, since ${clock(Math.max(kept.began, now.at - LENGTH_S))}, `
    + "of all router processes. Marks at the top: ▼ an engine went, ▲ one came.");
  before = latest = now;
}

async function refresh() {
  try {
    const newest = kept.samples.length ? kept.samples.at(-1).at : 0;
    const answer = await fetch(`${STATE_URL}?since=${newest}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    show(await answer.json());
    awaySince = null;
  } catch (error) {
    awaySince = awaySince || Date.now() / 1000;
    const state = byId("state");
    setText(state, `the router does not answer since ${clock(awaySince)} (${error.message})`
      + (latest ? `; what is shown is of ${clock(latest.at)}` : ""));
    state.className = "bad";
    before = null;
  }
  setTimeout(refresh, EVERY_MS);
}

makeCharts();
byId("when").addEventListener("input", event => {
  const place = Number(event.target.value);
  pick(place >= kept.samples.length - 1 ? null : kept.samples[place].at);
});
byId("now").addEventListener("click", () => pick(null));
let resizing = 0;
addEventListener("resize", () => {
  cancelAnimationFrame(resizing);
  resizing = requestAnimationFrame(() => { if (latest) { CHARTS.filter(isShown).forEach(draw); drawFlow(latest); } });
});
refresh();
