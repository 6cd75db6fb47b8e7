// The visible part of the trace: range of the axis, scroll position, and canvas coordinates.

const GUTTER = 150;  // names of lanes and tracks
const OVERVIEW = { y: 6, height: 34 };
const RULER = { y: 44, height: 18 };
const HOST = { y: 66, height: 15 };
const DEVICE = { y: 85, height: 15 };
const LANES_TOP = 122;  // below a line of headings
const LANE_HEIGHTS = [3, 5, 8, 12, 16, 20, 26];

class View {
  constructor(trace) {
    this.trace = trace;
    this.isByTime = true;
    this.width = this.height = 100;
    this.scroll = 0;
    this.laneHeight = 20;
    // The lanes shown, from the top, and the place of each lane; -1 if it is hidden.
    this.isOnlyInView = trace.numLanes > 100;
    this.shown = [];
    this.placeOfLane = new Int32Array(trace.numLanes);
    this.fit();
  }

  get axisEnd() { return this.isByTime ? Math.max(this.trace.end, 1) : Math.max(this.trace.numSteps, 1); }
  get plotWidth() { return Math.max(this.width - GUTTER - 12, 10); }
  get scale() { return this.plotWidth / (this.end - this.begin); }
  get tracksTop() { return Math.max(this.height - TRACKS_HEIGHT, LANES_TOP + 40); }
  get lanesHeight() { return this.tracksTop - LANES_TOP; }
  get maxScroll() { return Math.max(0, this.shown.length * this.laneHeight - this.lanesHeight); }

  // All lanes, or those of requests that live in the visible range.
  chooseLanes() {
    const { trace, isByTime } = this;
    this.shown = [];
    for (let lane = 0; lane < trace.numLanes; lane++) {
      const isShown = !this.isOnlyInView ||
        (trace.laneBegin(lane, isByTime) < this.end && trace.laneEnd(lane, isByTime) > this.begin);
      this.placeOfLane[lane] = isShown ? this.shown.push(lane) - 1 : -1;
    }
    this.scrollTo(this.scroll);
  }

  resize(width, height) {
    this.width = width;
    this.height = height;
    this.scrollTo(this.scroll);
  }

  // The largest lane height at which all lanes are visible, within limits.
  chooseLaneHeight() {
    const each = this.lanesHeight / Math.max(this.trace.numLanes, 1);
    this.laneHeight = LANE_HEIGHTS.findLast((h) => h <= each) || LANE_HEIGHTS[0];
    if (this.trace.numLanes <= 40) this.laneHeight = Math.max(this.laneHeight, 12);
  }

  changeLaneHeight(by) {
    const i = LANE_HEIGHTS.indexOf(this.laneHeight) + by;
    const middle = (this.scroll + this.lanesHeight / 2) / this.laneHeight;
    this.laneHeight = LANE_HEIGHTS[Math.max(0, Math.min(LANE_HEIGHTS.length - 1, i))];
    this.scrollTo(middle * this.laneHeight - this.lanesHeight / 2);
  }

  fit() {
    this.begin = 0;
    this.end = this.axisEnd;
  }

  x(place) { return GUTTER + (place - this.begin) * this.scale; }
  placeAt(x) { return this.begin + (x - GUTTER) / this.scale; }

  // Begin and end of a step on the axis.
  stepBegin(step) { return this.isByTime ? this.trace.deviceBegin[step] : step; }
  stepEnd(step) { return this.isByTime ? this.trace.deviceEnd[step] : step + 1; }

  segmentBegin(i) { return this.isByTime ? this.trace.segmentBegin(i) : this.trace.segments.step[i]; }
  segmentEnd(i) {
    const s = this.trace.segments;
    return this.isByTime ? this.trace.segmentEnd(i) : s.step[i] + s.numSteps[i];
  }

  // A time as a place on the axis, which may count steps.
  placeOfTime(time) {
    if (this.isByTime) return time;
    return firstWhere(0, this.trace.numSteps, (step) => this.trace.deviceEnd[step] > time);
  }

  // The visible steps, [first, last].
  stepRange() {
    const n = this.trace.numSteps;
    const first = firstWhere(0, n, (step) => this.stepEnd(step) > this.begin);
    const last = firstWhere(first, n, (step) => this.stepBegin(step) >= this.end) - 1;
    return [first, last];
  }

  // The step computed at a place, else the next one; -1 after the last.
  stepAt(place) {
    const n = this.trace.numSteps;
    const step = firstWhere(0, n, (k) => this.stepEnd(k) > place);
    return step < n ? step : -1;
  }

  zoom(factor, x) {
    const place = this.placeAt(x);
    const shortest = this.isByTime ? 20 : 2;
    const span = Math.min(this.axisEnd * 1.02, Math.max(shortest, (this.end - this.begin) * factor));
    const share = Math.max(0, Math.min(1, (x - GUTTER) / this.plotWidth));
    this.moveTo(place - share * span, span);
  }

  pan(pixels) { this.moveTo(this.begin + pixels / this.scale, this.end - this.begin); }

  moveTo(begin, span) {
    const margin = span * 0.02;
    this.begin = Math.max(-margin, Math.min(begin, this.axisEnd + margin - span));
    if (span >= this.axisEnd) this.begin = Math.min(0, (this.axisEnd - span) / 2);
    this.end = this.begin + span;
  }

  changeAxis() {
    const first = Math.max(this.stepAt(this.begin), 0);
    const lastSeen = this.stepAt(this.end);
    const last = lastSeen < 0 ? this.trace.numSteps - 1 : lastSeen;
    const isAll = this.end - this.begin >= this.axisEnd * 0.98;
    this.isByTime = !this.isByTime;
    if (isAll || last < 0) this.fit();
    else this.moveTo(this.stepBegin(first), Math.max(this.stepEnd(last) - this.stepBegin(first), 2));
  }

  showStep(step) {
    const begin = this.stepBegin(step), end = this.stepEnd(step);
    if (begin >= this.begin && end <= this.end) return;
    const span = Math.max(this.end - this.begin, (end - begin) * 3);
    this.moveTo((begin + end - span) / 2, span);
  }

  scrollTo(y) { this.scroll = Math.max(0, Math.min(this.maxScroll, y)); }
  laneY(lane) { return LANES_TOP + this.placeOfLane[lane] * this.laneHeight - this.scroll; }

  laneAt(y) {
    if (y < LANES_TOP || y >= this.tracksTop) return -1;
    return this.shown[Math.floor((y - LANES_TOP + this.scroll) / this.laneHeight)] ?? -1;
  }

  showLane(lane) {
    if (this.placeOfLane[lane] < 0) {
      const begin = this.trace.laneBegin(lane, this.isByTime), span = this.end - this.begin;
      this.moveTo(begin - span * 0.05, span);
      this.chooseLanes();
    }
    const y = this.placeOfLane[lane] * this.laneHeight;
    if (y < this.scroll || y + this.laneHeight > this.scroll + this.lanesHeight) {
      this.scrollTo(y - this.lanesHeight / 2);
    }
  }
}
