// Draws the tracks of the whole engine. Above the lanes: overview, ruler, host and device. Below the
// lanes: tokens per step, requests, the block pool, cache hits and evictions.

const TRACKS = [
  { name: "Tokens per step", height: 52 },
  { name: "Requests", height: 44 },
  { name: "KV blocks", height: 60 },
  { name: "Cache hits, evictions", height: 50 },
];
const POOL_TRACK = 2;
const TRACKS_HEIGHT = TRACKS.reduce((sum, track) => sum + track.height + 6, 4);

function paintTracks(painter) {
  const { view } = painter;
  painter.range = view.stepRange();
  paintOverview(painter);
  paintRuler(painter);
  paintHostAndDevice(painter);
  paintBelow(painter);
  paintMarks(painter);
}

// Stacked bars, one per step. Where several steps share a pixel, the step with the largest sum is
// drawn.
function paintBars(painter, first, last, xOf, y, height, columns, colours, greatest) {
  const { context } = painter;
  if (!greatest) return;
  let step = first, left = Math.round(xOf(first));
  while (step <= last) {
    let shown = step, sum = sumAt(columns, step), next = step + 1, right = Math.round(xOf(next));
    while (next <= last && right <= left) {
      const other = sumAt(columns, next);
      if (other > sum) { sum = other; shown = next; }
      right = Math.round(xOf(++next));
    }
    const width = Math.max(right - left, 1), cut = width > 5 ? 1 : 0;
    let base = y + height;
    for (let i = 0; i < columns.length; i++) {
      const part = (columns[i][shown] / greatest) * height;
      if (!part) continue;
      context.fillStyle = colours[i];
      context.fillRect(left, base - part, width - cut, part);
      base -= part;
    }
    step = next;
    left = right;
  }
}

function sumAt(columns, step) {
  let sum = 0;
  for (let i = 0; i < columns.length; i++) sum += columns[i][step];
  return sum;
}

function total(values) {
  let sum = 0;
  for (const value of values) sum += value;
  return sum;
}

function greatestOf(columns, first, last) {
  let greatest = 0;
  for (let step = first; step <= last; step++) greatest = Math.max(greatest, sumAt(columns, step));
  return greatest;
}

// Where the bar of a step begins. Bars are adjacent: gaps between steps are not drawn.
function barX(view) {
  const { trace } = view;
  return (step) => {
    if (step < trace.numSteps) return view.x(view.stepBegin(step));
    return view.x(view.axisEnd);
  };
}

function paintOverview(painter) {
  const { context, view, colours } = painter, { trace } = view, { prefill, decode } = trace.steps;
  const { y, height } = OVERVIEW, end = view.axisEnd;
  const xOf = (step) => {
    const place = step < trace.numSteps ? view.stepBegin(step) : end;
    return GUTTER + (place / end) * view.plotWidth;
  };
  context.fillStyle = colours.panel;
  context.fillRect(GUTTER, y, view.plotWidth, height);
  painter.text("Whole run", 12, y + height / 2, colours.muted);
  paintBars(painter, 0, trace.numSteps - 1, xOf, y, height, [decode, prefill],
    [colours.decode, colours.prefill], trace.greatest.tokens);
  const from = GUTTER + Math.max(0, view.begin / end) * view.plotWidth;
  const to = GUTTER + Math.min(1, view.end / end) * view.plotWidth;
  context.fillStyle = colours.bg;
  context.globalAlpha = 0.72;
  context.fillRect(GUTTER, y, from - GUTTER, height);
  context.fillRect(to, y, GUTTER + view.plotWidth - to, height);
  context.globalAlpha = 1;
  context.strokeStyle = colours.accent;
  context.lineWidth = 1.5;
  context.strokeRect(from + 0.5, y + 0.5, Math.max(to - from - 1, 3), height - 1);
}

function paintRuler(painter) {
  const { context, view, colours } = painter, { y, height } = RULER;
  const span = view.end - view.begin;
  let gap = 10 ** Math.floor(Math.log10(span / (view.plotWidth / 90)));
  for (const factor of [2, 2.5, 2]) if (gap * view.scale < 90) gap *= factor;
  if (!view.isByTime) gap = Math.max(1, Math.round(gap));
  const isInSeconds = gap >= 1e5 || (gap >= 1000 && view.end >= 1e7);
  const unit = view.isByTime ? isInSeconds ? 1e6 : gap < 1000 ? 1 : 1e3 : 1;
  const name = { 1: " µs", 1000: " ms", 1000000: " s" }[unit];
  painter.text(view.isByTime ? "Time" : "Steps", 12, y + height / 2, colours.muted);
  context.strokeStyle = colours.line;
  context.lineWidth = 1;
  for (let place = Math.ceil(Math.max(view.begin, 0) / gap) * gap; place <= view.end; place += gap) {
    const x = Math.round(view.x(place)) + 0.5;
    if (place > view.axisEnd * 1.0001) break;
    context.beginPath();
    context.moveTo(x, y + height - 5);
    context.lineTo(x, y + height);
    context.moveTo(x, LANES_TOP);
    context.globalAlpha = 0.55;
    context.lineTo(x, LANES_TOP + Math.min(view.lanesHeight, 4));
    context.stroke();
    context.globalAlpha = 1;
    const value = place / unit;
    const label = view.isByTime ? Number(value.toFixed(3)) + name : String(place);
    if (x + 3 + 6 * label.length > view.width) break;  // the label would be cut off
    painter.text(label, x + 3, y + height / 2 - 1, colours.muted, { size: 10.5 });
  }
}

// Host and device time of each step. A step may be dispatched while the previous one is computed.
function paintHostAndDevice(painter) {
  const { context, view, colours } = painter, { trace } = view, { steps } = trace;
  painter.text("Host", 12, HOST.y + HOST.height / 2, colours.muted);
  painter.text("Device", 12, DEVICE.y + DEVICE.height / 2, colours.muted);
  painter.text("Request", 12, LANES_TOP - 10, colours.muted, { size: 10.5 });
  painter.text("prompt", GUTTER - 10, LANES_TOP - 10, colours.muted, { size: 10.5, align: "right" });
  context.save();
  context.beginPath();
  context.rect(GUTTER, HOST.y, view.plotWidth, DEVICE.y + DEVICE.height - HOST.y);
  context.clip();
  const [first, last] = painter.range;
  const bar = (from, to, place, colour, least = 0.6) => {
    const x = view.x(from), width = Math.max(view.x(to) - x, least);
    context.fillStyle = colour;
    context.fillRect(x, place.y, width, place.height);
  };
  let nextX = -Infinity;
  for (let step = Math.max(first - 2, 0); step <= Math.min(last + 2, trace.numSteps - 1); step++) {
    const x = view.x(view.stepBegin(step)), end = view.x(view.stepEnd(step));
    if (end < nextX) continue;  // less than a pixel
    nextX = end < x + 1 ? x + 1 : -Infinity;
    const colour = step === painter.chosen ? colours.accent
      : steps.prefill[step] ? colours.prefill : colours.decode;
    const cut = end - x > 4 ? 1 / view.scale : 0;
    bar(view.stepBegin(step), view.stepEnd(step) - cut, DEVICE, colour, 1);
    if (end - x > 30) {
      painter.text((end - x > 62 ? "step " : "") + steps.number[step], (x + end) / 2, DEVICE.y + DEVICE.height / 2 + 0.5,
        steps.prefill[step] && step !== painter.chosen ? "#1b1f24" : colours.bg,
        { size: 10, align: "center", width: end - x - 4 });
    }
    if (!view.isByTime) continue;
    bar(steps.began[step], steps.planned[step], HOST, colours.accent);
    bar(steps.planned[step], steps.dispatched[step], HOST, colours.muted);
    if (steps.collected[step] >= 0) {
      bar(steps.asked[step], steps.collected[step], HOST, colours.line);
      bar(steps.collected[step], steps.committed[step], HOST, colours.fg);
    }
  }
  if (!view.isByTime) {
    paintBars(painter, first, last, barX(view), HOST.y, HOST.height, trace.hostColumns,
      [colours.accent, colours.muted, colours.fg], greatestOf(trace.hostColumns, first, last));
  }
  context.restore();
}

function paintBelow(painter) {
  const { context, view, colours } = painter, { steps } = view.trace;
  const { greatest } = view.trace;
  const plots = [
    [[steps.decode, steps.prefill], [colours.decode, colours.prefill], greatest.tokens],
    [[steps.running, steps.waiting], [colours.decode, colours.waiting], greatest.requests],
    poolPlot(painter),
  ];
  let y = view.tracksTop + 4;
  context.fillStyle = colours.bg;
  context.fillRect(0, view.tracksTop, view.width, view.height - view.tracksTop);
  context.fillStyle = colours.line;
  context.fillRect(0, view.tracksTop, view.width, 1);
  const [first, last] = painter.range;
  TRACKS.forEach((track, i) => {
    context.fillStyle = colours.panel;
    context.fillRect(GUTTER, y, view.plotWidth, track.height);
    context.save();
    context.beginPath();
    context.rect(GUTTER, y, view.plotWidth, track.height);
    context.clip();
    if (plots[i]) paintBars(painter, first, last, barX(view), y, track.height, ...plots[i]);
    else paintHits(painter, y, track.height);
    context.restore();
    if (plots[i]) {
      const whole = i === POOL_TRACK && plots[i][2] < greatest.blocks
        ? ` of ${greatest.blocks.toLocaleString("en")}` : "";
      painter.text(`at most ${plots[i][2].toLocaleString("en")}${whole}`, 12,
        y + track.height / 2 + 8, colours.muted, { size: 10.5, width: GUTTER - 20 });
    } else {
      painter.text(`hits: at most ${greatest.hit.toLocaleString("en")} tokens`, 12,
        y + track.height / 2 + 4, colours.muted, { size: 10.5, width: GUTTER - 14 });
      painter.text(`evicted: at most ${greatest.evicted.toLocaleString("en")} blocks`, 12,
        y + track.height / 2 + 17, colours.muted, { size: 10.5, width: GUTTER - 14 });
    }
    painter.text(track.name, 12, y + track.height / 2 - (plots[i] ? 7 : 11),
      colours.fg, { width: GUTTER - 20 });
    y += track.height + 6;
  });
}

// The block pool. If at most a quarter of it is ever used, free blocks are left out and the scale ends
// at the largest number of used blocks: otherwise owned and cached blocks would be a thin line.
function poolPlot(painter) {
  const { view, colours } = painter, { steps, greatest } = view.trace;
  if (greatest.used && greatest.used < greatest.blocks / 4) {
    return [[steps.owned, steps.cached], [colours.owned, colours.cached], greatest.used];
  }
  return [[steps.owned, steps.cached, steps.free], [colours.owned, colours.cached, colours.free],
    greatest.blocks];
}

// Hits upwards in tokens, evictions downwards in blocks, each with its own scale.
function paintHits(painter, y, height) {
  const { view, colours } = painter, { steps } = view.trace, [first, last] = painter.range;
  const half = height / 2 - 1;
  const { greatest } = view.trace;
  paintBars(painter, first, last, barX(view), y, half, [steps.hit], [colours.hit], greatest.hit);
  const { context } = painter;
  context.save();
  context.translate(0, 2 * y + height);
  context.scale(1, -1);
  paintBars(painter, first, last, barX(view), y, half, [steps.evicted], [colours.evicted],
    greatest.evicted);
  context.restore();
  context.fillStyle = colours.line;
  context.fillRect(GUTTER, y + height / 2 - 0.5, view.plotWidth, 1);
}

// On top: the selected step, failures, resets of the prefix cache, and the violated property.
function paintMarks(painter) {
  const { context, view, colours } = painter, { trace } = view;
  context.save();
  context.beginPath();
  context.rect(GUTTER - 6, RULER.y, view.plotWidth + 18, view.height);
  context.clip();
  if (painter.chosen >= 0) {
    const x = view.x(view.stepBegin(painter.chosen)), end = view.x(view.stepEnd(painter.chosen));
    context.fillStyle = colours.accent;
    context.globalAlpha = 0.13;
    context.fillRect(x, LANES_TOP, Math.max(end - x, 1), view.height - LANES_TOP);
    context.globalAlpha = 1;
    context.fillRect(x - 0.5, DEVICE.y, 1, view.height - DEVICE.y);
  }
  const mark = (step, text, colour) => {
    if (step < 0) return;
    const x = view.x(view.stepBegin(step));
    context.fillStyle = colour;
    context.fillRect(x - 0.75, DEVICE.y + DEVICE.height, 1.5, view.height);
    context.beginPath();
    context.moveTo(x - 7, DEVICE.y + DEVICE.height + 13);
    context.lineTo(x + 7, DEVICE.y + DEVICE.height + 13);
    context.lineTo(x, DEVICE.y + DEVICE.height + 1);
    context.fill();
    const isLeft = x > view.width - 160;
    painter.text(text, x + (isLeft ? -11 : 11), LANES_TOP + 5, colour,
      { bold: true, align: isLeft ? "right" : "left" });
  };
  for (const [, step, text, colour] of trace.marks) mark(step, text, colours[colour]);
  const { violation } = trace;
  if (violation) mark(violation.step, violation.property + " violated", colours.violation);
  context.restore();
}
