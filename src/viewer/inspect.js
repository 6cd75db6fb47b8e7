// Text of the tooltip under the pointer, and the panel of a selected step.

const KIND_NAMES = ["waiting", "preempted, waiting again", "paused", "pending", "prefill", "decode"];
const KIND_COLOURS = ["waiting", "preempted", "paused", "waiting", "prefill", "decode"];

function milliseconds(microseconds) {
  if (microseconds < 0 || !Number.isFinite(microseconds)) return "–";
  if (microseconds < 10000) return (microseconds / 1000).toFixed(3) + " ms";
  if (microseconds < 1e6) return (microseconds / 1000).toFixed(1) + " ms";
  return (microseconds / 1e6).toFixed(3) + " s";
}

// The parts of a step in time order: [name, microseconds, colour].
function partsOf(trace, step) {
  const s = trace.steps, isOver = s.collected[step] >= 0;
  return [
    ["schedule", s.planned[step] - s.began[step], "accent"],
    ["dispatch", s.dispatched[step] - s.planned[step], "muted"],
    ["wait", isOver ? s.collected[step] - s.asked[step] : -1, "line"],
    ["commit", isOver ? s.committed[step] - s.collected[step] : -1, "fg"],
  ];
}

function stepLines(trace, step) {
  const s = trace.steps;
  return [
    ["device", milliseconds(trace.deviceEnd[step] - trace.deviceBegin[step])],
    ["host: schedule, dispatch, commit", partsOf(trace, step).filter(([name]) => name !== "wait")
      .map(([, time]) => milliseconds(time)).join(", ")],
    ["tokens: prefill, decode", s.prefill[step] + ", " + s.decode[step]],
    ["running, waiting", s.running[step] + ", " + s.waiting[step]],
    ["blocks: owned, cached, free", [s.owned[step], s.cached[step], s.free[step]].join(", ")],
    ["tokens from the prefix cache, evicted blocks", s.hit[step] + ", " + s.evicted[step]],
  ];
}

// The tooltip at a point of the canvas: {title, lines: [[name, value]], note, violation}, or null.
function describe(view, x, y) {
  const { trace } = view, place = view.placeAt(x);
  if (x < GUTTER || place < 0 || place > view.axisEnd) return null;
  const lane = view.laneAt(y);
  const step = view.stepAt(place);
  if (lane >= 0) return describeLane(view, lane, place, step);
  if (step < 0 || y < RULER.y) return null;
  const found = { title: "Step " + trace.steps.number[step], lines: stepLines(trace, step), step };
  const violation = trace.violation;
  if (violation && violation.step === step) found.violation = violation.text;
  return found;
}

function describeLane(view, lane, place, step) {
  const { trace } = view, { lanes, segments } = trace;
  const first = trace.firstSegment[lane], end = trace.firstSegment[lane + 1];
  const i = firstWhere(first, end, (k) => view.segmentEnd(k) > place);
  const title = trace.nameOf(lane);
  const violation = trace.violation && trace.violation.step === step ? trace.violation.text : "";
  const isIn = i < end && view.segmentBegin(i) <= place;
  if (isIn && trace.isRow(i)) return { ...describeRow(trace, lane, step), violation };
  if (isIn) {
    const lines = [["for", milliseconds(segments.end[i] - segments.begin[i])]];
    if (step >= 0) lines.push(["at step", trace.steps.number[step]]);
    if (trace.settings.policy === "priority") lines.push(["priority", lanes.priority[lane]]);
    if (trace.settings.policy === "fair") lines.push(["owner", lanes.owner[lane]]);
    const note = step >= 0 ? trace.reason(lane, step) : "";
    return { title: `${title}: ${KIND_NAMES[segments.kind[i]]}`, lines, note, violation, step };
  }
  if (i < end && trace.isRow(i) && view.isByTime && trace.steps.planned[segments.step[i]] <= place) {
    const note = "In flight: dispatched while the device computes the previous step.";
    return { ...describeRow(trace, lane, segments.step[i]), note, violation };
  }
  const time = view.isByTime ? place : trace.deviceEnd[Math.max(step, 0)];
  if (lanes.ended[lane] >= 0 && time >= lanes.ended[lane]) {
    const lines = [["after", milliseconds(lanes.ended[lane] - lanes.added[lane])]];
    lines.push(["prompt", lanes.numPrompt[lane] + " tokens"]);
    for (const content of trace.contentsIn(lane, 0, lanes.numPrompt[lane])) {
      lines.push(["content", contentText(content)]);
    }
    return { title: `${title}: finished (${lanes.reason[lane]})`, lines, step };
  }
  const why = step >= 0 && time >= lanes.added[lane] ? trace.reason(lane, step) : "";
  return why ? { title: `${title}: not scheduled in step ${trace.steps.number[step]}`, lines: [],
    note: why, violation, step } : null;
}

function describeRow(trace, lane, step) {
  const row = trace.row(lane, step), prompt = trace.lanes.numPrompt[lane];
  const numDrafts = row.drafts ? row.drafts[0] : 0;
  const isAgain = row.kind === PREFILL && row.start + row.numTokens - numDrafts > prompt;
  const lines = [
    ["step", trace.steps.number[step]],
    ["positions", `${row.start} to ${row.start + row.numTokens - 1}`],
    ["tokens", String(row.numTokens)],
    ["samples", String(row.numSamples)],
    ["device", milliseconds(trace.deviceEnd[step] - trace.deviceBegin[step])],
  ];
  if (row.drafts) lines.push(["draft tokens", draftsText(row.drafts)]);
  const contents = trace.contentsIn(lane, row.start, row.start + row.numTokens);
  for (const content of contents) lines.push(["content", contentText(content)]);
  if (row.hit) lines.push(["from the prefix cache", row.hit + " tokens"]);
  for (const content of trace.contentsIn(lane, 0, row.hit)) {
    lines.push(["cached content", contentText(content)]);
  }
  let note = "";
  if (trace.steps.collected[step] < 0) note = "In flight: the trace has no result of this step.";
  else if (isAgain) note = "Preempted earlier: its KV is computed again.";
  else if (row.kind === PREFILL && !row.numSamples) note = "A chunk: the rest of the prompt follows.";
  return { title: `${trace.nameOf(lane)}: ${KIND_NAMES[row.kind]}`, lines, note, step };
}

function draftsText([numDrafted, numAccepted]) {
  if (numAccepted < 0) return `${numDrafted}, not settled`;
  return `${numDrafted}: ${numAccepted} accepted, ${numDrafted - numAccepted} wasted`;
}

// "positions 0 to 5 of 61207069…"; a long hash is truncated.
function contentText([hash, first, last]) {
  const name = hash.length > 12 ? hash.slice(0, 12) + "…" : hash;
  return first === last ? `position ${first} of ${name}` : `positions ${first} to ${last} of ${name}`;
}

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function showTip(tip, found, x, y) {
  tip.hidden = !found;
  if (!found) return;
  tip.replaceChildren(element("b", "", found.title));
  for (const [name, value] of found.lines) {
    const row = element("div", "row");
    row.append(element("span", "", name), element("span", "", String(value)));
    tip.append(row);
  }
  if (found.note) tip.append(element("div", "note", found.note));
  if (found.violation) tip.append(element("div", "note violation", found.violation));
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top = (y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 12) : y + 18) + "px";
}

// The panel of a step: its times, its rows, and which requests were preempted or refused and why.
function showPanel(panel, view, step, onClose) {
  const { trace } = view;
  panel.hidden = step < 0;
  if (step < 0) return;
  const heading = element("h2", "", "Step " + trace.steps.number[step]);
  const close = element("button", "", "×");
  close.title = "Close (Esc)";
  close.onclick = onClose;
  heading.append(close);
  panel.replaceChildren(heading);
  if (trace.violation && trace.violation.step === step) {
    panel.append(element("div", "violation", trace.violation.text));
  }
  panel.append(table([], stepLines(trace, step)));
  const parts = partsOf(trace, step).filter(([, time]) => time >= 0);
  const sum = total(parts.map(([, time]) => time)) || 1;
  const bar = element("div", "bar");
  for (const [name, time, colour] of parts) {
    const piece = element("i");
    piece.style.cssText = `width:${(time / sum) * 100}%;background:var(--${colour})`;
    piece.title = `${name} ${milliseconds(time)}`;
    bar.append(piece);
  }
  panel.append(element("h3", "", "Host time"), bar,
    table([], parts.map(([name, time, colour]) => [name, milliseconds(time), colour])));
  showDecisions(panel, trace, step);
  const rows = trace.rowsOf(step);
  panel.append(element("h3", "", `Rows: ${rows.length}`));
  panel.append(table(["request", "positions", "tokens"], rows.slice(0, 400).map((row) => [
    trace.lanes.name[row.lane] + (row.hit ? `  (${row.hit} tokens cached)` : "")
      + (row.drafts ? `  (drafts ${draftsText(row.drafts)})` : "")
      + trace.contentsIn(row.lane, row.start, row.start + row.numTokens)
        .map((content) => `  (${contentText(content)})`).join(""),
    `${row.start}–${row.start + row.numTokens - 1}${row.numSamples ? " ▸" : ""}`,
    row.numTokens, KIND_COLOURS[row.kind],
  ])));
  if (rows.length > 400) panel.append(element("div", "why", `and ${rows.length - 400} more`));
  if (rows.some((row) => row.numSamples)) {
    panel.append(element("div", "why", "▸ samples one token, plus one per draft token"));
  }
}

function showDecisions(panel, trace, step) {
  const preempted = trace.preemptionsOf.get(step) || [];
  const nameOf = (lane) => trace.nameOf(lane);
  if (preempted.length) {
    panel.append(element("h3", "", "Preempted"));
    panel.append(table([], preempted.map(([, victim, asker]) =>
      [nameOf(victim), asker < 0 ? "" : "for " + nameOf(asker), "preempted"])));
  }
  const refused = trace.refusalsIn(step);
  if (!refused.length) return;
  panel.append(element("h3", "", "Not scheduled"));
  for (const [lane, reason] of refused) {
    panel.append(element("div", "", nameOf(lane)), element("div", "why", REASONS[reason]));
  }
  const head = trace.heads.get(step);
  const behind = head ? trace.steps.waiting[step] - 1 - preempted.length : 0;
  if (behind > 0) panel.append(element("div", "why", `and ${behind} behind ${nameOf(head[0])}`));
}

// A table. A row with one more entry than there are columns names the colour of its swatch last.
function table(names, rows) {
  const made = element("table");
  const width = names.length || 2;
  if (names.length) {
    const head = element("tr");
    names.forEach((name, i) => head.append(element("th", i ? "number" : "", name)));
    made.append(head);
  }
  for (const row of rows) {
    const line = element("tr");
    row.slice(0, width).forEach((value, i) => {
      const cell = element("td", i ? "number" : "");
      if (!i && row.length > width) {
        const swatch = element("span", "swatch");
        swatch.style.background = `var(--${row[width]})`;
        cell.append(swatch);
      }
      cell.append(String(value));
      line.append(cell);
    });
    made.append(line);
  }
  return made;
}
