// Draws the lanes: what each request did over the steps.

const SMALLEST_SLICE = 3;  // pixels from which each step of a decode is drawn as its own slice

class Painter {
  constructor(canvas, view) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
    this.view = view;
    this.found = new Set();
    this.chosen = -1;
    this.readColours();
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    this.colours = {};
    for (const name of ["waiting", "prefill", "decode", "preempted", "paused", "finished", "hit",
      "evicted", "violation", "owned", "cached", "free", "bg", "fg", "muted", "panel", "line",
      "accent"]) this.colours[name] = style.getPropertyValue("--" + name).trim();
    const { waiting, preempted, paused, prefill, decode } = this.colours;
    this.kindColours = [waiting, preempted, paused, waiting, prefill, decode];
    this.hatching = this._hatch(preempted);
  }

  _hatch(colour) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8;
    const context = tile.getContext("2d");
    context.strokeStyle = colour;
    context.lineWidth = 2.6;
    for (const x of [-4, 0, 4, 8]) {
      context.beginPath();
      context.moveTo(x, 8);
      context.lineTo(x + 8, 0);
      context.stroke();
    }
    return this.context.createPattern(tile, "repeat");
  }

  paint() {
    const { context, view, colours } = this;
    const ratio = window.devicePixelRatio || 1;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = colours.bg;
    context.fillRect(0, 0, view.width, view.height);
    context.textBaseline = "middle";
    this._paintLanes();
    paintTracks(this);
  }

  text(text, x, y, colour, { width = Infinity, size = 11, align = "left", bold = false } = {}) {
    const { context } = this;
    context.font = `${bold ? "600 " : ""}${size}px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif`;
    if (width < Infinity) text = this._shortened(text, width);
    context.fillStyle = colour;
    context.textAlign = align;
    context.fillText(text, x, y);
  }

  _shortened(text, width) {
    const { context } = this;
    if (context.measureText(text).width <= width) return text;
    let length = text.length;
    while (length > 1 && context.measureText(text.slice(0, length) + "…").width > width) length--;
    return text.slice(0, length) + "…";
  }

  _paintLanes() {
    const { context, view } = this, height = view.laneHeight;
    const first = Math.max(0, Math.floor(view.scroll / height));
    const last = Math.floor((view.scroll + view.lanesHeight) / height);
    context.save();
    context.beginPath();
    context.rect(0, LANES_TOP, view.width, view.lanesHeight);
    context.clip();
    for (const lane of view.shown.slice(first, last + 1)) {
      this._paintLane(lane, view.laneY(lane), height);
    }
    context.restore();
    this._paintScrollbar();
  }

  _paintLane(lane, y, height) {
    const { context, view, colours } = this, trace = view.trace;
    if (this.found.has(lane)) {
      context.fillStyle = colours.panel;
      context.fillRect(0, y, view.width, height);
      context.fillStyle = colours.accent;
      context.fillRect(0, y, 3, height);
    } else if (height >= 12 && view.placeOfLane[lane] % 2) {
      context.fillStyle = colours.panel;
      context.globalAlpha = 0.6;
      context.fillRect(0, y, view.width, height);
      context.globalAlpha = 1;
    }
    context.save();
    context.beginPath();
    context.rect(GUTTER, y, view.plotWidth + 12, height);
    context.clip();
    this._paintStalls(lane, y, height);
    const end = trace.firstSegment[lane + 1];
    let i = firstWhere(trace.firstSegment[lane], end, (k) => view.segmentEnd(k) > view.begin);
    for (; i < end && view.segmentBegin(i) < view.end; i++) this._paintSegment(i, y, height);
    this._paintEnd(lane, y, height);
    context.restore();
    if (height >= 12) this._paintName(lane, y, height);
  }

  _paintName(lane, y, height) {
    const { view, colours } = this, trace = view.trace, size = Math.min(11.5, height - 2);
    const isFound = this.found.has(lane);
    this.text(trace.lanes.name[lane], 12, y + height / 2 + 0.5, colours.fg,
      { width: GUTTER - 62, size, bold: isFound });
    const prompt = trace.lanes.numPrompt[lane];
    if (prompt) {
      this.text(String(prompt), GUTTER - 10, y + height / 2 + 0.5, colours.muted,
        { size: size - 1, align: "right" });
    }
  }

  // A running request that is not scheduled in a step: a thin line between its neighbouring slices.
  _paintStalls(lane, y, height) {
    const { context, view, colours } = this, trace = view.trace;
    context.fillStyle = colours.muted;
    for (const [, reason, first, count] of trace.refusalsOf.get(lane) || []) {
      if (reason === "ending") continue;
      const i = trace.segmentAtStep(lane, first);
      if (i >= 0 && !trace.isRow(i)) continue;  // waiting has its own shape
      const x = view.x(view.stepBegin(first)), end = view.x(view.stepEnd(first + count - 1));
      context.fillRect(x, y + height / 2 - 0.75, Math.max(end - x, 1), 1.5);
    }
  }

  _paintSegment(i, y, height) {
    const { context, view } = this, s = view.trace.segments, kind = s.kind[i];
    const x = Math.max(view.x(view.segmentBegin(i)), GUTTER - 5);
    const end = Math.min(view.x(view.segmentEnd(i)), GUTTER + view.plotWidth);
    const gap = height >= 8 ? 1.5 : height > 3 ? 0.5 : 0;
    context.fillStyle = this.kindColours[kind];
    if (kind < PREFILL) {
      if (end <= x) return;
      const thickness = Math.max(1, Math.min(height * 0.3, 5));
      if (kind === PREEMPTED && height >= 8) {
        context.fillStyle = this.hatching;
        context.fillRect(x, y + height * 0.22, end - x, height * 0.56);
      } else {
        context.fillRect(x, y + (height - thickness) / 2, Math.max(end - x, 0.5), thickness);
      }
      return;
    }
    const inner = height - 2 * gap;
    const perStep = (view.x(view.segmentEnd(i)) - view.x(view.segmentBegin(i))) / s.numSteps[i];
    if (s.numSteps[i] > 1 && perStep >= SMALLEST_SLICE) {
      this._paintSlices(i, y + gap, inner, perStep);
    } else {
      const cut = kind === PREFILL && end - x > 4 ? 1 : 0;
      context.fillRect(x, y + gap, Math.max(end - x - cut, 0.8), inner);
    }
    if (kind === PREFILL) this._paintChunk(i, x, end, y, height, gap);
    this._paintFlight(i, y + gap, inner);
  }

  // A pale slice: dispatched, while the device still computes a step without this request.
  _paintFlight(i, y, height) {
    const { context, view } = this, s = view.trace.segments;
    const follows = i > view.trace.firstSegment[s.lane[i]] &&
      s.step[i - 1] + s.numSteps[i - 1] === s.step[i] && view.trace.isRow(i - 1);
    if (!view.isByTime || follows) return;
    const x = view.x(view.trace.steps.planned[s.step[i]]), end = view.x(view.segmentBegin(i));
    if (end - x < 0.5) return;
    context.fillStyle = this.kindColours[s.kind[i]];
    context.globalAlpha = 0.4;
    context.fillRect(x, y, end - x, height);
    context.globalAlpha = 1;
  }

  _paintSlices(i, y, height, perStep) {
    const { context, view } = this, s = view.trace.segments;
    const [firstSeen, lastSeen] = this.range;
    const first = Math.max(s.step[i], firstSeen);
    const last = Math.min(s.step[i] + s.numSteps[i] - 1, lastSeen);
    const cut = perStep > 5 ? 1 : 0.5;
    for (let step = first; step <= last; step++) {
      const x = view.x(view.stepBegin(step)), end = view.x(view.stepEnd(step));
      context.fillRect(x, y, Math.max(end - x - cut, 0.8), height);
      if (end - x > 34 && height >= 11) {
        this.text(String(s.start[i] + step - s.step[i]), (x + end) / 2, y + height / 2 + 0.5,
          this.colours.bg, { size: 10, align: "center" });
        context.fillStyle = this.kindColours[DECODE];
      }
    }
  }

  // A chunk shows its number of tokens, and a light edge for tokens found in the prefix cache.
  _paintChunk(i, x, end, y, height, gap) {
    const { context, view, colours } = this, s = view.trace.segments;
    const hit = view.trace.hitOf.get(s.step[i] + ":" + s.lane[i]);
    if (hit) {
      const width = Math.max(Math.min((end - x) * 0.3, 9), 2.5);
      context.fillStyle = colours.hit;
      context.fillRect(x, y + gap, width, height - 2 * gap);
      x += width;
    }
    if (end - x > 26 && height >= 12) {
      this.text(String(s.numTokens[i]), (x + end) / 2, y + height / 2 + 0.5, "#1b1f24",
        { size: 10, align: "center" });
    }
  }

  _paintEnd(lane, y, height) {
    const { context, view, colours } = this, trace = view.trace;
    if (trace.lanes.ended[lane] < 0) return;
    const x = view.x(view.placeOfTime(trace.lanes.ended[lane]));
    const reason = trace.lanes.reason[lane];
    const isGood = reason === "stop" || reason === "length";
    const colour = isGood ? colours.finished : reason === "abort" ? colours.muted : colours.violation;
    context.fillStyle = colour;
    if (height >= 8) context.fillRect(x, y + 1, 3, height - 2);
    else context.fillRect(x, y, 2, height);
    if (!isGood && height >= 12) {
      this.text(reason, x + 7, y + height / 2 + 0.5, colour, { size: 10 });
    }
  }

  _paintScrollbar() {
    const { context, view, colours } = this;
    if (!view.maxScroll) return;
    const whole = view.shown.length * view.laneHeight;
    const height = Math.max(24, (view.lanesHeight * view.lanesHeight) / whole);
    const y = LANES_TOP + (view.scroll / view.maxScroll) * (view.lanesHeight - height);
    context.fillStyle = colours.muted;
    context.globalAlpha = 0.55;
    context.fillRect(view.width - 8, y, 5, height);
    context.globalAlpha = 1;
  }
}
