// The trace: unpacks the columns that timeline.py writes, and looks things up in them.

const WAITING = 0, PREEMPTED = 1, PAUSED = 2, PENDING = 3, PREFILL = 4, DECODE = 5;

const REASONS = {
  ending: "ending: its last token is being sampled, and nothing is left to compute",
  unsettled: "unsettled: its next token is being sampled and must settle first",
  held: "held: it gets no row, so that its blocks can go to an older request",
  budget: "budget: the tokens of this step are used, or kept for decodes",
  blocks: "blocks: too few are available, even after preempting all younger requests",
  closed: "closed: an older request got fewer blocks than it needed",
  preempting: "preempting: a step that preempts a request admits none",
  full: "full: the number of running requests is max_num_seqs",
  draining: "draining: steps in flight still write its blocks",
  "state slots": "state slots: none is left until steps in flight give some back",
};

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Trace(JSON.parse(await new Response(stream).text()));
}

// Binary search: the first index in [low, high) for which the monotone predicate `isAt` holds.
function firstWhere(low, high, isAt) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (isAt(middle)) high = middle; else low = middle + 1;
  }
  return low;
}

class Trace {
  constructor(data) {
    Object.assign(this, data);
    for (const [name, column] of Object.entries(this.segments)) {
      this.segments[name] = Float64Array.from(column);
    }
    this.numSteps = this.steps.number.length;
    this.numLanes = this.lanes.name.length;
    for (const [name, column] of Object.entries(this.steps)) {
      this.steps[name] = Float64Array.from(column);
    }
    this._findDeviceTimes();
    this._findGreatest();
    this._findSegmentsOfLanes();
    this.hitOf = new Map(this.hits.map(([step, lane, tokens]) => [step + ":" + lane, tokens]));
    this.draftsOf = new Map(
      this.drafts.map(([step, lane, ...told]) => [step + ":" + lane, told]));
    this.preemptionsOf = groupBy(this.preemptions, ([step]) => step);
    this.refusalsOf = groupBy(this.refusals, ([lane]) => lane);
    this.heads = this._findHeads();
    this.events = this._findEvents();
  }

  // Device time of a step as seen by the host: from its plan, or from the end of the previous step,
  // to the arrival of its tokens. The device is not queried.
  _findDeviceTimes() {
    const { planned, collected } = this.steps;
    this.deviceBegin = new Float64Array(this.numSteps);
    this.deviceEnd = new Float64Array(this.numSteps);
    let last = 0;
    for (let step = 0; step < this.numSteps; step++) {
      this.deviceBegin[step] = Math.max(planned[step], last);
      const end = collected[step] < 0 ? this.end : collected[step];
      last = this.deviceEnd[step] = Math.max(end, this.deviceBegin[step]);
    }
  }

  _findGreatest() {
    const s = this.steps, last = this.numSteps - 1;
    this.greatest = {
      tokens: greatestOf([s.prefill, s.decode], 0, last),
      requests: greatestOf([s.running, s.waiting], 0, last),
      blocks: greatestOf([s.owned, s.cached, s.free], 0, last),
      used: greatestOf([s.owned, s.cached], 0, last),
      hit: greatestOf([s.hit], 0, last),
      evicted: greatestOf([s.evicted], 0, last),
    };
    // Host time of each step without waiting: schedule, dispatch, commit.
    this.hostColumns = [[s.planned, s.began], [s.dispatched, s.planned], [s.committed, s.collected]]
      .map(([end, begin]) => end.map((time, step) => Math.max(0, time - begin[step])));
  }

  // First and last time of a lane, or its first and last step.
  laneBegin(lane, isByTime) {
    if (isByTime) return this.lanes.added[lane];
    const i = this.firstSegment[lane];
    return i < this.firstSegment[lane + 1] ? this.segments.step[i] : Infinity;
  }

  laneEnd(lane, isByTime) {
    if (isByTime) return this.lanes.ended[lane] < 0 ? this.end : this.lanes.ended[lane];
    const i = this.firstSegment[lane + 1] - 1;
    if (i < this.firstSegment[lane]) return -1;
    return this.segments.step[i] + this.segments.numSteps[i];
  }

  _findSegmentsOfLanes() {
    const lane = this.segments.lane;
    this.firstSegment = new Int32Array(this.numLanes + 1);
    for (let i = 0; i < lane.length; i++) this.firstSegment[lane[i] + 1] = i + 1;
    for (let i = 1; i <= this.numLanes; i++) {
      this.firstSegment[i] = Math.max(this.firstSegment[i], this.firstSegment[i - 1]);
    }
  }

  // By step, the waiting request that was refused. Requests behind it wait because of it.
  _findHeads() {
    const heads = new Map();
    for (const [lane, reason, first, count] of this.refusals) {
      for (let step = first; step < first + count; step++) {
        const i = this.segmentAtStep(lane, step);
        if (i >= 0 && this.segments.kind[i] < PREFILL) heads.set(step, [lane, reason]);
      }
    }
    return heads;
  }

  // Targets of the key n, in order: [step, text].
  _findEvents() {
    const found = this.preemptions.map(([step, lane]) => [step, this.lanes.name[lane]]);
    this.steps.evicted.forEach((count, step) => { if (count) found.push([step, "evicted"]); });
    if (this.violation) found.push([this.violation.step, "violation"]);
    return found.sort((a, b) => a[0] - b[0]);
  }

  // Display name of a request. Ids that the engine assigns are numbers.
  nameOf(lane) {
    const name = this.lanes.name[lane];
    return /^[0-9]+$/.test(name) ? "request " + name : name;
  }

  isRow(i) { return this.segments.kind[i] >= PREFILL; }

  segmentBegin(i) {
    const s = this.segments;
    return this.isRow(i) ? this.deviceBegin[s.step[i]] : s.begin[i];
  }

  segmentEnd(i) {
    const s = this.segments;
    return this.isRow(i) ? this.deviceEnd[s.step[i] + s.numSteps[i] - 1] : s.end[i];
  }

  // The segment of a lane that covers a step, or -1.
  segmentAtStep(lane, step) {
    const s = this.segments, end = this.firstSegment[lane + 1];
    let i = firstWhere(this.firstSegment[lane], end, (k) => s.step[k] + s.numSteps[k] > step);
    while (i < end && s.step[i] <= step) {
      if (s.step[i] + s.numSteps[i] > step) return i;
      i++;
    }
    return -1;
  }

  // The row of a request in a step, or null.
  row(lane, step) {
    const i = this.segmentAtStep(lane, step);
    if (i < 0 || !this.isRow(i)) return null;
    const s = this.segments, isDecode = s.kind[i] === DECODE;
    return {
      kind: s.kind[i],
      start: s.start[i] + (isDecode ? step - s.step[i] : 0),
      numTokens: s.numTokens[i],
      numSamples: s.numSamples[i],
      drafts: this.draftsOf.get(step + ":" + lane) || null,
      hit: this.hitOf.get(step + ":" + lane) || 0,
    };
  }

  // Content segments at positions [begin, end) of a lane's prompt: [content hash, first and last
  // offset in it].
  contentsIn(lane, begin, end) {
    return this.lanes.contents[lane]
      .filter(([first, last]) => Math.max(begin, first) < Math.min(end, last))
      .map(([first, last, hash]) =>
        [hash, Math.max(begin, first) - first, Math.min(end, last) - 1 - first]);
  }

  rowsOf(step) {
    const rows = [];
    for (let lane = 0; lane < this.numLanes; lane++) {
      const row = this.row(lane, step);
      if (row) rows.push({ lane, ...row });
    }
    return rows;
  }

  numRows() {
    let count = 0;
    const s = this.segments;
    for (let i = 0; i < s.lane.length; i++) if (this.isRow(i)) count += s.numSteps[i];
    return count;
  }

  refusalsIn(step) {
    return this.refusals.filter(([, , first, count]) => first <= step && step < first + count);
  }

  // Why a request is not scheduled in a step; "" if it is, or if the trace gives no reason.
  reason(lane, step) {
    for (const [, reason, first, count] of this.refusalsOf.get(lane) || []) {
      if (first <= step && step < first + count) return REASONS[reason];
    }
    const i = this.segmentAtStep(lane, step), kind = i < 0 ? -1 : this.segments.kind[i];
    const victims = this.preemptionsOf.get(step) || [];
    const own = victims.find(([, victim]) => victim === lane);
    if (own) return own[2] < 0 ? "preempted" : "preempted for " + this.nameOf(own[2]);
    if (kind === PAUSED) return "paused";
    if (kind === PENDING) return "its leader computes the prompt for both";
    const head = this.heads.get(step);
    if ((kind === WAITING || kind === PREEMPTED) && head && head[0] !== lane) {
      return "behind " + this.nameOf(head[0]) + ", which waits: " + REASONS[head[1]];
    }
    return "";
  }
}

function groupBy(entries, keyOf) {
  const groups = new Map();
  for (const entry of entries) {
    const key = keyOf(entry);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(entry);
  }
  return groups;
}
