// Shows what /cluster/stream sends: the whole state of the cluster, once a second. Nothing that comes from there is ever
// read as markup: texts become text nodes.
"use strict";

const SILENT_MS = 5000;      // without a view for so long, the router counts as lost
const HIDDEN_MS = 60000;     // a page that nobody sees for so long does not ask
const RETRY_MS = [1000, 2000, 4000];
const SAMPLES = 125;         // views that are remembered, of which only sums are kept
const RATE_MS = 5000;        // rates are those of so long
const MAP_CELLS = [48, 5];   // columns and rows of a block map
const HOST_CELLS = [48, 1];
const MAX_FLIGHTS = 12;      // at once

const $ = (id) => document.getElementById(id);

// ---- words and numbers ----------------------------------------------------------------------------------------------

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const count = (value) => (value < 100000 ? grouped : short).format(value);
const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
const percent = (part, all) => (all > 0 ? `${Math.round((100 * part) / all)} %` : "–");

function time(seconds) {
  if (seconds === null) return "–";
  if (seconds < 0.0095) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  return seconds < 60 ? `${seconds.toFixed(seconds < 9.95 ? 1 : 0)} s` : `${Math.round(seconds / 60)} min`;
}

function age(ms) {
  const s = Math.floor(ms / 1000);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  return s < 172800 ? `${Math.floor(s / 3600)} h` : `${Math.floor(s / 86400)} d`;
}

function axis(bound) {  // below a bar: milliseconds, unless a unit says otherwise
  if (bound === undefined) return "more";
  if (bound < 1) return String(Number((bound * 1000).toFixed(1)));
  return bound < 60 ? `${bound}s` : `${bound / 60}m`;
}

// ---- elements -------------------------------------------------------------------------------------------------------

function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function value(node, number, text) {
  if (node.dataset.value !== String(number)) node.dataset.value = number;
  put(node, text === undefined ? count(number) : text);
}

function make(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

function draw(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, text] of Object.entries(attributes)) node.setAttribute(name, text);
  return node;
}

const attribute = (node, name, text) => { if (node.getAttribute(name) !== text) node.setAttribute(name, text); };

// Fills a table with one row per item. Rows are kept by key, so that focus, selection and position stay.
function fill(table, items, columns) {
  const body = table.tBodies[0], rows = new Map(Array.from(body.rows, (row) => [row.dataset.key, row]));
  let next = body.firstElementChild;
  for (const item of items) {
    let row = rows.get(item.key);
    rows.delete(item.key);
    if (!row) {
      row = make("tr", table.dataset.filled && table.dataset.marks ? "new" : "");
      row.dataset.key = item.key;
      row.setAttribute("role", "row");
      Array.from(table.tHead.rows[0].cells).forEach((head) => {
        const cell = make("td", head.className);
        cell.dataset.label = head.textContent;
        cell.setAttribute("role", "cell");
        row.append(cell);
      });
    }
    if (row === next) next = next.nextElementSibling;
    else body.insertBefore(row, next);
    columns(item).forEach((content, i) => {
      const cell = row.cells[i];
      if (typeof content === "string") put(cell, content);
      else content(cell);
    });
  }
  for (const row of rows.values()) row.remove();
  table.dataset.filled = "yes";
  table.nextElementSibling.hidden = items.length > 0;
}

const named = (text) => (cell) => { cell.classList.add("id"); put(cell, text); attribute(cell, "title", text); };

function prepareTables() {
  for (const table of document.querySelectorAll("table")) {
    table.setAttribute("role", "table");
    for (const group of [table.tHead, table.tBodies[0]]) group.setAttribute("role", "rowgroup");
    table.tHead.rows[0].setAttribute("role", "row");
    for (const head of table.tHead.rows[0].cells) head.setAttribute("role", "columnheader");
    attribute(table, "aria-labelledby", table.closest("section").getAttribute("aria-labelledby"));
  }
}

// ---- what is remembered: sums of the last two minutes ---------------------------------------------------------------

let samples = [];

const added = (one, other) => (one.length ? one.map((each, i) => each + (other[i] || 0)) : [...other]);

function sampleOf(view) {
  const sample = { at: view.up_ms, output: 0, workers: new Map() };
  for (const name of ["first_token", "between_tokens"]) sample[name] = { bounds: [], counts: [] };
  for (const model of view.traffic) {
    sample.output += model.num_output_tokens;
    for (const name of ["first_token", "between_tokens"]) {
      if (!model[name]) continue;
      sample[name].bounds = model[name].bounds_s;
      sample[name].counts = added(sample[name].counts, model[name].counts);
    }
  }
  for (const { incarnation, load } of view.workers) {
    sample.workers.set(incarnation, [load.step_plan_s, load.step_run_s, load.step_commit_s, load.num_step_tokens]);
  }
  return sample;
}

function remember(view) {
  if (samples.length && view.up_ms < samples.at(-1).at) samples = [];
  samples.push(sampleOf(view));
  samples = samples.slice(-SAMPLES);
}

// The sample of `ms` ago, or the oldest one.
const earlier = (ms) => samples.find((sample) => sample.at >= samples.at(-1).at - ms - 200) || samples[0];

function rate(name) {
  const last = samples.at(-1), first = earlier(RATE_MS);
  return last.at > first.at ? (1000 * (last[name] - first[name])) / (last.at - first.at) : null;
}

// What a histogram has counted in the last minute, or since the router started.
function histogram(name) {
  const { bounds, counts } = samples.at(-1)[name];
  if (document.querySelector("input[name=span]:checked").value === "all") return { bounds, counts };
  const before = earlier(60000)[name].counts;
  return { bounds, counts: counts.map((each, i) => each - (before[i] || 0)) };
}

// The time that a part of the values do not exceed: by proportion within its bucket, as Prometheus does it.
function quantile({ bounds, counts }, part) {
  const all = counts.reduce((sum, each) => sum + each, 0);
  if (!all) return null;
  let below = 0;
  for (let i = 0; i < bounds.length; i += 1) {
    if (below + counts[i] >= part * all) {
      const low = i ? bounds[i - 1] : 0;
      return low + ((bounds[i] - low) * (part * all - below)) / counts[i];
    }
    below += counts[i];
  }
  return bounds.at(-1);
}

// ---- parts of the page ----------------------------------------------------------------------------------------------

function showFigures(view) {
  const perSecond = rate("output");
  put($("tokens-per-s"), perSecond === null ? "–" : perSecond < 10 ? perSecond.toFixed(1) : count(Math.round(perSecond)));
  showSparkline();
  value($("num-streams"), view.num_streams, plural(view.num_streams, "stream"));
  let asked = 0, hits = 0, running = 0;
  for (const { load } of view.workers) {
    asked += load.prefix_asked_tokens;
    hits += load.prefix_hit_tokens;
    running += load.num_sequences - load.num_waiting - load.num_swapped;
  }
  value($("num-running"), Math.max(0, running));
  put($("prefix-hits"), percent(hits, asked));
  value($("hit-tokens"), hits);
  if (view.queue) {
    value($("num-queued"), view.queue.num_queued);
    value($("queued-tokens"), view.queue.queued_tokens);
    value($("num-tenants"), view.queue.num_tenants, plural(view.queue.num_tenants, "tenant"));
    value($("num-moving"), view.sequences.filter((each) => each.moving_to).length);
  }
  document.title = `octavo · ${count(Math.max(0, running))} running${view.queue && view.queue.num_queued ? `, ${count(view.queue.num_queued)} waiting` : ""}`;
}

function showSparkline() {
  const end = samples.at(-1).at, points = [];
  for (let i = 1; i < samples.length; i += 1) {
    const before = samples[Math.max(0, i - 3)], spent = samples[i].at - before.at;
    points.push([240 - (end - samples[i].at) / 500, spent > 0 ? (samples[i].output - before.output) / spent : 0]);
  }
  const top = Math.max(...points.map(([, y]) => y), 1e-9);
  const line = points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${(38 - (34 * y) / top).toFixed(1)}`).join("");
  attribute($("sparkline").querySelector(".line"), "d", line);
  attribute($("sparkline").querySelector(".area"), "d", points.length ? `${line}L240 40L${points[0][0].toFixed(1)} 40Z` : "");
}

function showLatency() {
  const minute = Math.min(60, Math.round((samples.at(-1).at - earlier(60000).at) / 1000));
  put($("minute-label"), minute < 58 ? `last ${minute} s` : "last minute");
  for (const [id, name, what] of [["ttft", "first_token", "Time to the first token"], ["itl", "between_tokens", "Time between tokens"]]) {
    const found = histogram(name), all = found.counts.reduce((sum, each) => sum + each, 0);
    const [median, most] = [quantile(found, 0.5), quantile(found, 0.95)];
    put($(id), time(median));
    put($(`${id}-95`), time(most));
    value($(`${id}-count`), all, all ? `${plural(all, id === "ttft" ? "request" : "token")}, milliseconds` : "nothing measured");
    const summary = all ? `${what}: half within ${time(median)}, 95 % within ${time(most)}, of ${count(all)}` : `${what}: nothing measured`;
    attribute($(`${id}-bars`), "aria-label", summary);
    showBars($(`${id}-bars`), found, median);
  }
}

function showBars(node, { bounds, counts }, median) {
  const top = Math.max(...counts, 1);
  while (node.children.length > counts.length) node.lastElementChild.remove();
  counts.forEach((each, i) => {
    const bar = node.children[i] || node.appendChild(make("span", "", make("i"), make("b")));
    const low = i ? bounds[i - 1] : 0, holds = median !== null && median > low && (bounds[i] === undefined || median <= bounds[i]);
    bar.classList.toggle("some", each > 0);
    bar.classList.toggle("median", holds && each > 0);
    bar.firstElementChild.style.height = `${((100 * each) / top).toFixed(1)}%`;
    put(bar.lastElementChild, axis(bounds[i]));
    attribute(bar, "title", `${count(each)} ${bounds[i] === undefined ? `above ${time(bounds.at(-1))}` : `within ${time(bounds[i])}`}`);
  });
}

// A map of blocks: each cell is a block, or as many as it takes to fit all of them.
function showMap(map, parts, all, [columns, rows]) {
  const cells = Math.min(all, columns * rows), ends = [];
  let sum = 0;
  for (const [, number] of parts) {
    const before = ends.length ? ends.at(-1) : 0;
    sum += number;
    ends.push(Math.min(cells, Math.max(before + (number > 0 ? 1 : 0), Math.round((cells * sum) / Math.max(1, all)))));
  }
  let cell = 0;
  parts.forEach(([name], i) => {
    let path = "";
    for (; cell < ends[i]; cell += 1) path += `M${(cell % columns) * 8} ${Math.floor(cell / columns) * 8}h6.6v6.6h-6.6z`;
    attribute(map.querySelector(`.${name}`), "d", path);
  });
}

const cards = new Map();  // by incarnation

function makeCard(key) {
  const map = (name, [columns, rows], classes) => {
    const svg = draw("svg", { class: name, viewBox: `0 0 ${columns * 8 - 1.4} ${rows * 8 - 1.4}`, role: "img" });
    for (const each of classes) svg.append(draw("path", { class: each }));
    return svg;
  };
  const card = { badge: make("span", "badge"), name: make("span"), what: make("p", "what"), fields: {}, list: make("dl") };
  card.map = map("map", MAP_CELLS, ["used", "cached", "free"]);
  card.host = map("map host", HOST_CELLS, ["swapped", "demoted", "free"]);
  for (const [field, label] of [["num_sequences", "sequences"], ["num_waiting", "waiting"], ["num_swapped", "swapped"], ["tokens_per_s", "tokens/s"],
    ["num_used_blocks", "used"], ["num_cached_blocks", "cached"], ["num_free_blocks", "free"], ["prefix_hits", "prefix hits"],
    ["per_decode", "tokens/decode"], ["right_drafts", "right guesses"]]) {
    card.fields[field] = make("dd", "", "–");
    card.fields[field].dataset.field = field;
    card.list.append(make("div", "", make("dt", "", label), card.fields[field]));
  }
  card.phases = make("div", "phases", make("i", "plan"), make("i", "run"), make("i", "commit"));
  card.split = make("p", "split");
  card.node = make("article", "worker", make("h3", "", card.name, card.badge), card.what, card.map, card.host, card.list, card.phases, card.split);
  card.node.dataset.incarnation = key;
  return card;
}

function stateOf({ load, available, reason }) {
  if (reason === "lost") return ["lost", "bad", "its process has died"];
  if (load.draining) return ["draining", "warn", load.num_sequences ? "its sequences move away" : "empty: it can be stopped"];
  return available ? ["available", "good", ""] : ["unavailable", "warn", reason];
}

function showWorkers(view) {
  const gone = new Set(cards.keys());
  let place = $("workers").firstElementChild;
  for (const worker of view.workers) {
    const key = worker.incarnation || `${worker.worker_id} ${worker.endpoint}`;
    if (!cards.has(key)) cards.set(key, makeCard(key));
    gone.delete(key);
    const card = cards.get(key);
    if (card.node === place) place = place.nextElementSibling;
    else $("workers").insertBefore(card.node, place);
    showWorker(card, worker);
  }
  for (const key of gone) {
    cards.get(key).node.remove();
    cards.delete(key);
  }
  put($("num-workers"), count(view.workers.length));
  $("no-workers").hidden = view.workers.length > 0;
}

function showWorker(card, worker) {
  const { load, num_blocks: blocks, num_host_blocks: hosts } = worker, [state, tone, why] = stateOf(worker);
  card.node.dataset.worker = worker.worker_id;
  card.node.dataset.state = state;
  card.worker = worker.worker_id;
  card.node.classList.toggle("lost", state === "lost");
  put(card.name, worker.worker_id);
  put(card.badge, state);
  card.badge.className = `badge ${tone}`;
  const role = { WORKER_ROLE_PREFILL: "prompts", WORKER_ROLE_DECODE: "outputs" }[worker.role];
  const what = why || [worker.model, worker.device, role, `${count(worker.context_tokens)} tokens of context`].filter(Boolean).join(" · ");
  put(card.what, what);
  attribute(card.what, "title", `${what}${why && reasonMore(worker, why) ? ` (${worker.reason})` : ""}`);
  attribute(card.map, "aria-label", `Blocks: ${load.num_used_blocks} used, ${load.num_cached_blocks} in the prefix cache, ${load.num_free_blocks} free, of ${blocks}`);
  showMap(card.map, [["used", load.num_used_blocks], ["cached", load.num_cached_blocks], ["free", load.num_free_blocks]], blocks, MAP_CELLS);
  const swapped = Math.max(0, hosts - load.num_free_host_blocks), demoted = Math.min(load.num_demoted_blocks, hosts - swapped);
  attribute(card.host, "aria-label", hosts ? `Host pool: ${swapped} swapped out, ${demoted} with demoted prefixes, of ${hosts} blocks` : "No host pool");
  showMap(card.host, [["swapped", swapped], ["demoted", demoted], ["free", hosts - swapped - demoted]], hosts, HOST_CELLS);
  for (const field of ["num_sequences", "num_waiting", "num_swapped", "num_used_blocks", "num_cached_blocks", "num_free_blocks"]) {
    value(card.fields[field], load[field]);
  }
  put(card.fields.prefix_hits, percent(load.prefix_hit_tokens, load.prefix_asked_tokens));
  showDrafts(card, load);
  showSteps(card, worker);
}

function showDrafts(card, { num_decodes: decodes, drafts }) {
  const sum = (field) => drafts.reduce((all, each) => all + Number(each[field]), 0), right = sum("num_accepted_drafts");
  put(card.fields.per_decode, Number(decodes) ? (1 + right / Number(decodes)).toFixed(2) : "–");
  put(card.fields.right_drafts, percent(right, sum("num_drafts")));
  const told = drafts.map((each) => `${each.drafter}: ${each.num_accepted_drafts} of ${each.num_drafts}`).join(", ");
  attribute(card.fields.right_drafts.parentNode, "title", told);
}

const reasonMore = (worker, why) => worker.reason && worker.reason !== why;

function showSteps(card, { incarnation, load }) {
  const now = samples.at(-1), before = earlier(RATE_MS), old = before.workers.get(incarnation);
  const [plan, run, commit, tokens] = now.workers.get(incarnation).map((each, i) => (old ? each - old[i] : 0));
  put(card.fields.tokens_per_s, old && now.at > before.at ? count(Math.round((1000 * tokens) / (now.at - before.at))) : "–");
  const all = plan + run + commit;
  [plan, run, commit].forEach((part, i) => { card.phases.children[i].style.width = all > 0 ? `${(100 * part) / all}%` : "0"; });
  const step = `step ${load.step_ms < 9.95 ? load.step_ms.toFixed(1) : Math.round(load.step_ms)} ms`;
  put(card.split, all > 0 ? `${step} · ${["plan", "run", "commit"].map((name, i) => `${name} ${Math.round((100 * [plan, run, commit][i]) / all)}`).join(" · ")} %` : "no steps now");
}

const MOVES = { MOVE_KIND_MIGRATED: "with its blocks", MOVE_KIND_TAKEN_OVER: "its worker was lost", MOVE_KIND_REPLACED: "given back" };
let lastMove = null;

function showMoves(view) {
  fill($("moves"), view.moves.map((move) => ({ ...move, key: String(move.number) })), (move) => [
    named(move.request_id), move.from_worker, move.to_worker, [MOVES[move.kind], move.seen].filter(Boolean).join(": "), age(move.age_ms),
  ]);
  const newest = Math.max(0, ...view.moves.map((move) => move.number));
  if (lastMove !== null && newest > lastMove) fly(view.moves.filter((move) => move.number > lastMove));
  lastMove = newest;
}

function fly(moves) {
  const cardOf = (name) => [...cards.values()].findLast((card) => card.worker === name);
  moves.slice(0, MAX_FLIGHTS).forEach((move, i) => {
    const from = cardOf(move.from_worker), to = cardOf(move.to_worker);
    for (const [card, className] of [[from, "gives"], [to, "gets"]]) {
      if (!card) continue;
      card.node.classList.add(className);
      clearTimeout(card[className]);
      card[className] = setTimeout(() => card.node.classList.remove(className), 2200);
    }
    if (from && to && !matchMedia("(prefers-reduced-motion: reduce)").matches) flight(move, from, to, i);
  });
}

function flight(move, from, to, order) {
  const label = make("span", "flight", move.request_id.slice(0, 12));
  $("flights").append(label);
  const [start, end] = [from, to].map((card) => {
    const box = card.node.getBoundingClientRect();
    return `translate(${Math.round(box.left + box.width / 2 - label.offsetWidth / 2)}px, ${Math.round(box.top + 48)}px)`;
  });
  label.animate(
    [{ transform: start, opacity: 0 }, { transform: start, opacity: 1, offset: 0.15 }, { transform: end, opacity: 1, offset: 0.85 }, { transform: end, opacity: 0 }],
    { duration: 1500, delay: 70 * order, easing: "ease-in-out", fill: "both" },
  ).finished.finally(() => label.remove());
}

function showQueue(view) {
  const all = view.queue.queued_tokens;
  fill($("tenants"), view.queue.tenants.map((each) => ({ ...each, key: `t${each.tenant}` })), (each) => [
    (cell) => { put(cell, each.tenant || "(none)"); attribute(cell, "title", each.tenant); },
    (cell) => value(cell, each.num_queued),
    (cell) => value(cell, each.queued_tokens),
    (cell) => {
      if (!cell.firstElementChild) cell.append(make("i", "bar"), make("span", "hidden"));
      cell.firstElementChild.style.width = `${(100 * each.queued_tokens) / Math.max(1, all)}%`;
      put(cell.lastElementChild, percent(each.queued_tokens, all));
    },
  ]);
}

const STATES = { REQUEST_STATE_QUEUED: "waiting", REQUEST_STATE_RUNNING: "running" };

function showSequences(view) {
  const names = new Map(view.workers.map((worker) => [worker.incarnation, worker.worker_id]));
  const wanted = $("filter").value.trim().toLowerCase();
  const items = view.sequences.map((each) => ({
    ...each, key: each.seq_id, owner: each.owner, worker: names.get(each.owner) || each.owner, target: names.get(each.moving_to) || each.moving_to,
  }));
  const shown = items.filter((each) => !wanted || [each.request_id, each.tenant, each.worker, each.target].some((text) => text.toLowerCase().includes(wanted)));
  put($("num-shown"), `${wanted ? `${count(shown.length)} of ` : ""}${count(items.length)}${view.has_more_sequences ? ", the oldest" : ""}`);
  fill($("sequences"), shown, (each) => [
    named(each.request_id), each.tenant || "–", each.target ? "moving" : STATES[each.state] || "–",
    (cell) => showOwner(cell, each),
    (cell) => value(cell, each.prompt_tokens),
    (cell) => value(cell, each.num_tokens.reduce((sum, length) => sum + length, 0)),
    age(each.age_ms),
  ]);
}

function showOwner(cell, { worker, target }) {
  const text = target ? `${worker} → ${target}` : worker || "–";
  if (cell.textContent === text) return;
  cell.replaceChildren(worker || "–", ...(target ? [make("span", "arrow", " → "), target] : []));
}

// ---- the connection -------------------------------------------------------------------------------------------------

let source = null, lastView = null, lastAt = 0, failures = 0, retryTimer = 0, hiddenTimer = 0;

function show(view) {
  if (lastView && lastView.router_id !== view.router_id) [samples, lastMove] = [[], null];
  lastView = view;
  remember(view);
  put($("router-name"), view.router_name || view.router_id);
  put($("up"), `up ${age(view.up_ms)}`);
  showFigures(view);
  showLatency();
  showWorkers(view);
  showMoves(view);
  if (view.queue) {
    showQueue(view);
    showSequences(view);
  }
  document.body.dataset.at = view.up_ms;
  tell(view.failure ? `${view.failure.message}. The queue and the sequences are those of an earlier moment.` : "");
}

function tell(text) {
  $("trouble").hidden = !text;
  put($("trouble"), text);
}

function setConnection(state, text) {
  $("connection").className = `pill ${state}`;
  put($("connection"), text);
  document.body.classList.toggle("stale", state === "lost");
}

function connect() {
  clearTimeout(retryTimer);
  if (source) source.close();
  source = new EventSource("cluster/stream");
  const opened = source;
  lastAt = performance.now();
  source.onmessage = (event) => {
    if (source !== opened) return;
    lastAt = performance.now();
    failures = 0;
    setConnection("live", "Live");
    show(JSON.parse(event.data));
  };
  source.onerror = () => { if (source === opened) lose(); };
}

function lose() {
  source.close();
  source = null;
  setConnection("lost", "Reconnecting …");
  const when = lastView ? ` What you see is from ${new Date(Date.now() - (performance.now() - lastAt)).toLocaleTimeString()}.` : "";
  explain().then((why) => { if (!source || failures) tell(`${why}${when} This page tries again by itself.`); });
  retryTimer = setTimeout(connect, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]);
  failures += 1;
}

// Why there is no stream: what the router says, if it answers at all.
async function explain() {
  try {
    const answer = await fetch("cluster", { signal: AbortSignal.timeout(900) });
    if (answer.ok) return "The stream from the router broke.";
    const { error } = await answer.json();
    return `The router refuses: ${error.message || error}.`;
  } catch {
    return "The router does not answer.";
  }
}

function watchSilence() {
  if (source && performance.now() - lastAt > SILENT_MS) lose();
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(hiddenTimer);
  if (document.hidden) {
    hiddenTimer = setTimeout(() => {
      clearTimeout(retryTimer);
      if (source) source.close();
      source = null;
      setConnection("waiting", "Paused");
    }, HIDDEN_MS);
  } else if (!source) connect();
});

// ---- what people choose ---------------------------------------------------------------------------------------------

const THEMES = ["system", "light", "dark"];

function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").dataset.chosen = theme;
  put($("theme"), { system: "◐", light: "☀", dark: "☾" }[theme]);
  const words = { system: "as the system has them", light: "light", dark: "dark" };
  attribute($("theme"), "aria-label", `Colours: ${words[theme]}`);
  attribute($("theme"), "title", `Colours: ${words[theme]}`);
  try { localStorage.setItem("octavo-theme", theme); } catch { /* a browser may keep nothing */ }
}

function storedTheme() {
  try { return localStorage.getItem("octavo-theme"); } catch { return null; }
}

$("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf($("theme").dataset.chosen) + 1) % THEMES.length]));
$("filter").addEventListener("input", () => { if (lastView && lastView.queue) showSequences(lastView); });
for (const input of document.querySelectorAll("input[name=span]")) input.addEventListener("change", () => { if (samples.length) showLatency(); });

setTheme(THEMES.includes(storedTheme()) ? storedTheme() : "system");
prepareTables();
connect();
setInterval(watchSilence, 1000);
